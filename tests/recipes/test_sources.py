from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.t5_summarization.docstrings import Pair
from recipes.t5_summarization.sources import Row, Split, load_rows, rows_of, split_docstrings, split_rows
from tests.recipes.rows import wikihow_frame, write_csv, write_parquet


def load(path: Path, *, target: str = "title", seed: int = 0) -> Split:
    return load_rows(str(path), target=target, cache_dir=path.parent, validation_share=0.2, seed=seed)


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_files_of_the_wikihow_schema_are_read_without_nulls(write: Callable[[Path], Path], tmp_path: Path) -> None:
    split = load(write(tmp_path))
    rows = split.train + split.validation
    # The 64 complete rows, and the one whose summary alone is missing.
    assert len(rows) == len(set(rows)) == 65
    titles = {row.target for row in rows}
    assert {"How to Boil an Egg", "How to Draw a Map", "A title and a text"} <= titles
    assert not titles & {"A title without a text", "A blank text"}
    assert "A text without a title." not in {row.source for row in rows}


def test_the_words_none_and_na_in_a_csv_are_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("title,text,summary\nNone,NA,x\n,text,x\nnull,nan,x\n")
    split = load(path)
    assert sorted(split.train + split.validation) == [Row("NA", "None"), Row("nan", "null")]


def test_the_split_is_80_to_20_and_follows_the_seed() -> None:
    rows = [Row(f"source {i}", f"target {i}") for i in range(100)]
    split = split_rows(rows, validation_share=0.2, seed=1)
    assert (len(split.train), len(split.validation)) == (80, 20)
    assert sorted(split.train + split.validation) == sorted(rows)
    assert split == split_rows(rows, validation_share=0.2, seed=1)
    assert split != split_rows(rows, validation_share=0.2, seed=2)
    assert split.first(5, 3) == Split(split.train[:5], split.validation[:3])


def test_docstrings_are_split_by_module() -> None:
    pairs = [Pair(module=f"m{i // 5}.py", source=f"source {i}", target=f"target {i}") for i in range(500)]
    module_of = {pair.source: pair.module for pair in pairs}
    split = split_docstrings(pairs, validation_share=0.2, seed=0)
    train, validation = ({module_of[row.source] for row in part} for part in split)
    assert not train & validation
    assert len(train | validation) == 100
    assert len(split.train) + len(split.validation) == 500
    assert len(validation) > 5
    assert [row.source for row in split.train] != sorted(row.source for row in split.train), "rows are shuffled"


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ValueError, match=r"\['title', 'text', 'summary'\], but not \['headline'\]"):
        rows_of(wikihow_frame(), "headline")
