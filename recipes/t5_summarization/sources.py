"""Rows of (source, target) text: docstrings of this machine, or the WikiHow schema from the hub or a local file."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from recipes.t5_summarization.docstrings import Pair, in_validation, load_pairs

if TYPE_CHECKING:
    import pandas

DOCSTRINGS = "docstrings"
WIKIHOW_SOURCE_COLUMN = "text"


class Row(NamedTuple):
    """One example.

    Args:
        source: What the encoder reads.
        target: What the decoder writes.
    """

    source: str
    target: str


class Split(NamedTuple):
    """The rows of both parts.

    Args:
        train: Rows to learn from.
        validation: Rows that are only measured.
    """

    train: list[Row]
    validation: list[Row]

    def first(self, train_rows: int, validation_rows: int) -> Split:
        """The same split with at most so many rows in each part."""
        return Split(self.train[:train_rows], self.validation[:validation_rows])


def load_rows(location: str, *, target: str, cache_dir: Path, validation_share: float, seed: int) -> Split:
    """Read, split and shuffle all rows of one source; the same arguments give the same rows in the same order.

    Args:
        location: ``"docstrings"``, the path of a ``.csv`` or ``.parquet`` file, or the name of a data set on the hub.
        target: Column to predict in the WikiHow schema; docstrings have one target only.
        cache_dir: Where harvested docstrings are kept.
        validation_share: Of the rows, or of the source files of docstrings.
        seed: Of the split and of the order.
    """
    if location == DOCSTRINGS:
        return split_docstrings(load_pairs(cache_dir), validation_share=validation_share, seed=seed)
    frame = read_local(Path(location)) if Path(location).suffix in {".csv", ".parquet"} else read_hub(location)
    return split_rows(rows_of(frame, target), validation_share=validation_share, seed=seed)


def split_docstrings(pairs: Sequence[Pair], *, validation_share: float, seed: int) -> Split:
    """Split by module, so that no file is in both parts, then shuffle."""
    split = Split([], [])
    for pair in pairs:
        part = split.validation if in_validation(pair.module, validation_share, seed) else split.train
        part.append(Row(pair.source, pair.target))
    for rows in split:
        random.Random(seed).shuffle(rows)
    return split


def split_rows(rows: Sequence[Row], *, validation_share: float, seed: int) -> Split:
    """Shuffle, then cut; the validation part has ``round(validation_share * len(rows))`` rows."""
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    num_train = len(shuffled) - round(validation_share * len(shuffled))
    return Split(shuffled[:num_train], shuffled[num_train:])


def rows_of(frame: pandas.DataFrame, target: str) -> list[Row]:
    """The rows of a table of the WikiHow schema in which neither text is null or blank.

    Args:
        frame: Has the string columns ``text`` and ``target``.
        target: ``"title"`` or ``"summary"``.
    """
    columns = [WIKIHOW_SOURCE_COLUMN, target]
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ValueError(f"the data has the columns {list(frame.columns)}, but not {missing}; set `target` or the file")
    texts = frame[columns].dropna().itertuples(index=False, name=None)
    return [Row(source, label) for source, label in texts if source.strip() and label.strip()]


def read_local(path: Path) -> pandas.DataFrame:
    """A local table; ``FileNotFoundError`` names the path if there is none."""
    import pandas  # optional extra of the recipe

    if path.suffix == ".parquet":
        return pandas.read_parquet(path)
    # Only an empty field is a null: "None" and "NA" are words.
    return pandas.read_csv(path, dtype=str, keep_default_na=False, na_values=[""])


def read_hub(name: str) -> pandas.DataFrame:
    """The split ``train`` of a data set on the Hugging Face hub, downloaded once into the hub's own cache."""
    import datasets  # optional extra of the recipe

    return datasets.load_dataset(name, split="train").to_pandas()
