from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.t5_summarization.data import SummarizationData, collate
from recipes.t5_summarization.sources import Row
from recipes.t5_summarization.tokenization import load_tokenizer, train_bpe
from tests.recipes.rows import write_csv

ROWS = [Row(f"Read the file number {i}, then close it.", f"Read file {i}.") for i in range(50)]


def make_data(folder: Path, **options: Any) -> SummarizationData:
    defaults: dict[str, object] = {
        "source": str(write_csv(folder)),
        "vocab_size": 300,
        "cache_dir": str(folder / "cache"),
    }
    data = SummarizationData(**{**defaults, "batch_size": 4, **options})  # type: ignore[arg-type]
    data.prepare_data()
    data.setup("fit")
    return data


def test_padding_is_masked_in_source_and_labels() -> None:
    batch = collate(
        [{"source": [5, 6, 1], "target": [7, 1]}, {"source": [8, 1], "target": [9, 9, 1]}],
        pad_id=0,
        lengths=(None, None),
    )
    assert batch["input_ids"].tolist() == [[5, 6, 1], [8, 1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[7, 1, -100], [9, 9, 1]]


def test_batches_are_padded_to_fixed_lengths_on_request(tmp_path: Path) -> None:
    data = make_data(tmp_path, max_source_tokens=40, max_target_tokens=17, pad_to_max_length=True)
    for batch in [*data.train_dataloader(), *data.val_dataloader()]:
        assert batch["input_ids"].shape[1] == batch["attention_mask"].shape[1] == 40
        assert batch["labels"].shape[1] == 17


def test_rows_are_cut_and_end_with_the_end_token(tmp_path: Path) -> None:
    data = make_data(tmp_path, max_source_tokens=6, max_target_tokens=3)
    assert {len(example["source"]) for example in data.train} == {6}
    assert {len(example["target"]) for example in data.train} == {3}
    assert {ids[-1] for example in data.train for ids in (example["source"], example["target"])} == {1}


def test_the_tokenizer_is_trained_once_and_then_cached(tmp_path: Path) -> None:
    first = load_tokenizer("bpe", ROWS, vocab_size=300, cache_dir=tmp_path)
    (folder,) = tmp_path.iterdir()
    written = (folder / "tokenizer.json").stat().st_mtime_ns
    second = load_tokenizer("bpe", ROWS, vocab_size=300, cache_dir=tmp_path)
    assert (folder / "tokenizer.json").stat().st_mtime_ns == written
    assert first.get_vocab() == second.get_vocab()
    load_tokenizer("bpe", ROWS[:-1], vocab_size=300, cache_dir=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "other rows are another tokenizer"


def test_the_bpe_has_the_ids_of_t5_and_gives_back_any_text() -> None:
    tokenizer = train_bpe(ROWS, vocab_size=300)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert len(tokenizer) <= 300
    text = "Unseen words: \u00e9t\u00e9 {x}!"
    ids = tokenizer(text)["input_ids"]
    assert ids[-1] == 1
    assert 2 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text


def test_a_source_without_rows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("title,text,summary\n,a text,\n")
    data = SummarizationData(source=str(path), cache_dir=str(tmp_path))
    data.prepare_data()  # On one rank only, where an error would leave the others waiting.
    with pytest.raises(ValueError, match=r"empty\.csv' has 0 training and 0 validation rows after dropping nulls"):
        data.setup("fit")
