"""Rows of (source, target) text: docstrings of this machine, or two columns of a file or of a data set on the hub."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from recipes.t5_summarization.docstrings import Pair, in_validation, load_pairs

if TYPE_CHECKING:
    import pandas

DOCSTRINGS = "docstrings"


class Row(NamedTuple):
    """One example."""

    source: str  # What the encoder reads.
    target: str  # What the decoder writes; empty for a text to be summarized that has none.


class Split(NamedTuple):
    """The rows to learn from, and those that are only measured."""

    train: list[Row]
    validation: list[Row]

    def first(self, train_rows: int, validation_rows: int) -> Split:
        """The same split with at most so many rows in each part."""
        return Split(self.train[:train_rows], self.validation[:validation_rows])


def load_rows(
    location: str,
    validation: str | None,
    *,
    columns: tuple[str, str],
    cache_dir: Path,
    validation_share: float,
    seed: int,
) -> Split:
    """Read, split and shuffle all rows of one source; the same arguments give the same rows in the same order.

    See :class:`~recipes.t5_summarization.data.SummarizationData`. ``validation`` keeps its own order; without it a
    ``validation_share`` of the rows, or of the files of docstrings, is held out.
    """
    if location == DOCSTRINGS:
        if validation is not None:
            raise ValueError(f"docstrings are split by file; leave out validation_source, got {validation!r}")
        return split_docstrings(load_pairs(cache_dir), validation_share=validation_share, seed=seed)
    rows = rows_of(read_table(location), *columns)
    if validation is None:
        return split_rows(rows, validation_share=validation_share, seed=seed)
    return Split(split_rows(rows, validation_share=0.0, seed=seed).train, rows_of(read_table(validation), *columns))


def rows_to_predict(location: str, columns: tuple[str, str]) -> list[Row]:
    """All rows of a file or data set in its order, also those without text; it need not have the target's column."""
    frame, (source, target) = read_table(location), columns
    if target not in frame.columns:
        frame = frame.assign(**{target: ""})
    return rows_of(frame.fillna({source: "", target: ""}), source, target, keep_blank=True)


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


def rows_of(frame: pandas.DataFrame, source: str, target: str, *, keep_blank: bool = False) -> list[Row]:
    """The rows of two columns in which neither text is null or blank; with ``keep_blank`` all of them."""
    missing = [column for column in (source, target) if column not in frame.columns]
    if missing:
        raise ValueError(
            f"the data has the columns {list(frame.columns)}, but not {missing}; set source_column, target_column or "
            "the file"
        )
    texts = frame[[source, target]].dropna()
    rows = [Row(*row) for row in texts.itertuples(index=False, name=None)]
    return [row for row in rows if keep_blank or (row.source.strip() and row.target.strip())]


def read_table(location: str) -> pandas.DataFrame:
    """A ``.csv`` file, or the split ``train`` of a data set on the hub, downloaded once into the hub's own cache."""
    if location.endswith(".csv"):
        import pandas  # optional extra of the recipe

        # Only an empty field is a null: "None" and "NA" are words.
        return pandas.read_csv(location, dtype=str, keep_default_na=False, na_values=[""])
    import datasets  # optional extra of the recipe

    return datasets.load_dataset(location, split="train").to_pandas()
