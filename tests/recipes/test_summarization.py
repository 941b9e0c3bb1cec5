"""Rows, batches, tokens, model and scores of the recipe for summarization."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightning_muon.cli.main import main
from recipes.t5_summarization.data import Batch, SummarizationData, collate
from recipes.t5_summarization.docstrings import Pair
from recipes.t5_summarization.metrics import rouge, unigram_entropy
from recipes.t5_summarization.model import T5Summarizer, build_t5, warmup_then_linear_decay
from recipes.t5_summarization.sources import Row, Split, load_rows, rows_of, split_docstrings, split_rows
from recipes.t5_summarization.tokenization import load_tokenizer, train_bpe
from tests.integration.training import load as load_package
from tests.integration.training import trainer
from tests.recipes.rows import wikihow_frame, write_csv, write_parquet
from tests.support.processes import ProcessPool


def load(path: Path, *, target: str = "title", seed: int = 0) -> Split:
    columns = ("text", target)
    return load_rows(str(path), None, columns=columns, cache_dir=path.parent, validation_share=0.2, seed=seed)


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


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_json_lines_and_a_file_to_validate_on(tmp_path: Path) -> None:
    article = [{"article": f"text {number}", "abstract": f"title {number}", "n": number} for number in range(6)]
    train = write_jsonl(tmp_path / "train.jsonl", [*article[:4], {"article": None, "abstract": "x"}])
    held_out = write_jsonl(tmp_path / "held_out.jsonl", article[4:])
    columns = {"source_column": "article", "target_column": "abstract"}
    data = make_data(tmp_path, source=train, validation_source=held_out, source_prefix="summarize: ", **columns)
    assert sorted(data.rows.train) == [Row(f"text {number}", f"title {number}") for number in range(4)]
    assert data.rows.validation == [Row("text 4", "title 4"), Row("text 5", "title 5")], "in the order of the file"
    assert data.tokenizer is not None
    assert data.tokenizer.decode(data.validation[0]["source"], skip_special_tokens=True) == " summarize: text 4"
    with pytest.raises(ValueError, match="column 'n' has values that are no text, such as 4"):
        make_data(tmp_path, source=held_out, source_column="n", target_column="abstract")
    (tmp_path / "broken.jsonl").write_text('{"article": "a"}\n{"article": ')
    with pytest.raises(ValueError, match=r"broken\.jsonl is not one JSON object per line"):
        make_data(tmp_path, source=str(tmp_path / "broken.jsonl"), **columns)
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(ValueError, match=r"rows\.txt must end with one of \.csv, \.jsonl"):
        make_data(tmp_path, source=str(tmp_path / "rows.txt"))


def test_only_pretrained_weights_ask_for_a_prefix(tmp_path: Path) -> None:
    config = transformers.T5Config(**TINY, task_specific_params={"summarization": {"prefix": "summarize: "}})
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    summarizer = T5Summarizer(architecture=str(tmp_path), pretrained=True)
    assert summarizer.source_prefix == "summarize: "
    assert all(module.training for module in summarizer.modules()), "dropout is on"
    assert T5Summarizer(architecture=TINY).source_prefix == ""


def _fit_and_predict(folder: str, articles: str) -> None:
    package = load_package()
    package.seed_everything(0)
    data = SummarizationData(
        source=str(Path(folder, "rows.csv")),
        predict_source=articles,
        vocab_size=300,
        max_source_tokens=20,
        max_target_tokens=8,
        batch_size=2,
        cache_dir=f"{folder}/cache",
    )
    sizes = TINY | {"vocab_size": 300}
    model = T5Summarizer(
        architecture=sizes, lr=0.02, rouge_batches=1, max_new_tokens=6, predictions=f"{folder}/predictions.jsonl"
    )
    logger = package.loggers.CSVLogger(folder, name="", version="run")
    fitter = trainer(package, max_steps=6, limit_val_batches=1, val_check_interval=3, logger=logger)
    fitter.fit(model, datamodule=data)
    fitter.save_checkpoint(f"{folder}/run/checkpoints/last.ckpt")
    fitter.predict(model, datamodule=data)
    model.hparams.predictions = f"{folder}/rows.csv/predictions.jsonl"
    kind, text = (OSError, "") if fitter.is_global_zero else (RuntimeError, "rank 0 of the group failed.*")
    with pytest.raises(kind, match=rf"{text}rows\.csv"):
        fitter.predict(model, datamodule=data)


def test_predictions_of_several_ranks_are_those_of_the_exported_model(gloo: ProcessPool, tmp_path: Path) -> None:
    """Five rows for two ranks with batches of two: the sampler gives one row to both."""
    write_csv(tmp_path)
    texts = ["Put an egg on the table.", "Draw a map, and wait.", "", "Fold the letter.", "Mend a sock."]
    rows = [{"text": text, "id": number} for number, text in enumerate(texts)]
    rows[1]["title"] = "How to Draw"
    gloo.run(_fit_and_predict, str(tmp_path), write_jsonl(tmp_path / "articles.jsonl", rows), world_size=2)
    main(["convert", str(tmp_path / "run/checkpoints/last.ckpt"), str(tmp_path / "t5.ckpt")])
    T5Summarizer.load_from_checkpoint(tmp_path / "t5.ckpt").model.save_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run/tokenizer")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    expected = []
    for text in texts:
        inputs = tokenizer(text, truncation=True, max_length=20, return_tensors="pt")
        ids = model.generate(inputs["input_ids"], max_new_tokens=6, do_sample=False)
        expected.append({"source": text, "prediction": tokenizer.decode(ids[0], skip_special_tokens=True).strip()})
    expected[1]["target"] = "How to Draw"
    assert len({each["prediction"] for each in expected}) > 1
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == expected
    samples = json.loads((tmp_path / "run/samples.json").read_text())
    assert [each["step"] for each in samples] == [6, 6, 3, 3]
    assert samples[0].keys() == {"step", "source", "target", "text"}


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
        rows_of(wikihow_frame(), "text", "headline")


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


TINY = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, 50, (3, 5), generator=generator)
    labels[0, 2:] = labels[2, 4:] = -100
    source = torch.randint(3, 50, (3, 7), generator=generator)
    return Batch(input_ids=source, attention_mask=torch.ones_like(source), labels=labels)


def logits_of(model: T5Summarizer, batch: Batch) -> torch.Tensor:
    # What the decoder reads: the labels shifted right, with the pad token 0 first and in place of -100.
    decoder_input = torch.zeros_like(batch["labels"])
    decoder_input[:, 1:] = batch["labels"][:, :-1].clamp(min=0)
    return model.model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], decoder_input_ids=decoder_input
    ).logits


@pytest.mark.parametrize(("paper_loss", "num_tokens"), [(False, 11), (True, 15)])
def test_the_loss_is_the_mean_over_tokens(paper_loss: bool, num_tokens: int) -> None:
    """Without padding, or as in the paper with padding as labels."""
    torch.manual_seed(0)
    model, batch = T5Summarizer(architecture=TINY, paper_loss=paper_loss), make_batch()
    loss, num_positions = model._loss(batch)
    log_probability, labels = logits_of(model, batch).log_softmax(-1), batch["labels"]
    tokens = [(r, c) for r in range(3) for c in range(5) if paper_loss or labels[r, c] != -100]
    expected = -sum(log_probability[r, c, labels[r, c].clamp(min=0)] for r, c in tokens) / len(tokens)
    assert num_positions == len(tokens) == num_tokens
    # Same numbers summed in another order.
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    factors = [warmup_then_linear_decay(step, warmup_steps=4, total_steps=12) for step in range(13)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert (factors[8], factors[12]) == (0.5, 0.0)


@pytest.mark.parametrize(("name", "num_parameters"), [("t5-small", 60_506_624), ("t5-base", 222_903_552)])
def test_named_architectures_have_the_published_sizes(name: str, num_parameters: int) -> None:
    with torch.device("meta"):
        model = build_t5(name, pretrained=False)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_an_unknown_architecture_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"one of \['t5-base', 't5-small'\] or a mapping, got 't5-huge'"):
        build_t5("t5-huge", pretrained=False)


def test_unigram_entropy_equals_a_hand_computation() -> None:
    # Training counts of 0, 1, 2, 3: 2, 1, 0, 1; plus one: 3, 2, 1, 2 of 8. Validation tokens: 0, 0, 2.
    expected = (2 * math.log(8 / 3) + math.log(8 / 1)) / 3
    assert unigram_entropy([[0, 1], [0, 3]], [[0], [0, 2]], vocab_size=4) == pytest.approx(expected, rel=1e-12)


def test_rouge_equals_a_hand_computation() -> None:
    # Stemmed: "open the red box" against "opens the box". 1-grams: 3 common, precision 3/3, recall 3/4.
    # 2-grams: {open the} common, of 2 and of 3. Longest common subsequence: open the box.
    scores = rouge(["open the red box", "nothing in common"], ["opens the box", "quite other words"])
    assert scores["rouge1"] == pytest.approx((6 / 7) / 2)
    assert scores["rouge2"] == pytest.approx((2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)) / 2)
    assert scores["rougeL"] == pytest.approx((6 / 7) / 2)
