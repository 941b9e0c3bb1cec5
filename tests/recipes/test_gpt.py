"""The GPT recipe: its tokens, and each of its configurations on two processes, on the pages of docs/."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.commands.config.config_args import load_config_from_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import lightning_muon.accelerate
from lightning_muon.cli.launch import split_config
from lightning_muon.cli.main import main
from lightning_muon.engine.options import Options
from recipes.gpt.data import TextData
from recipes.gpt.model import GPT
from tests.support.accelerate_cpu import fsdp2_on_cpu
from tests.support.processes import ProcessPool
from tests.support.programs import ROOT, run_program

RECIPE = ROOT / "recipes" / "gpt"
PAGES = ROOT / "docs" / "*.md"


def make_data(folder: Path, **options: Any) -> TextData:
    defaults: dict[str, Any] = {"vocab_size": 400, "context_size": 16, "batch_size": 4, "cache_dir": str(folder)}
    data = TextData(**defaults | options)
    data.prepare_data()
    return data


def tokens_of(windows: Any) -> list[int]:
    return [token for index in range(len(windows)) for token in windows[index]["input_ids"].tolist()]


def write_files(folder: Path, count: int = 12) -> dict[str, str]:
    """Parts of a page, in files of their own."""
    page = (ROOT / "docs" / "pipelines.md").read_text()
    size = len(page) // count
    texts = {f"{number:02}.txt": page[number * size : (number + 1) * size] for number in range(count)}
    for name, text in texts.items():
        (folder / name).write_text(text)
    return texts


def test_windows_have_all_text_and_it_is_tokenized_once(tmp_path: Path) -> None:
    texts = write_files(tmp_path)
    options = {"text_files": [f"{tmp_path}/*.txt"], "validation_share": 0.25}
    data = make_data(tmp_path / "cache", **options)
    data.setup("fit")
    (folder,) = (tmp_path / "cache").glob("gpt-*")
    written_at = (folder / "train").stat().st_mtime_ns
    tokens = np.fromfile(folder / "train", np.uint16).tolist()
    *documents, rest = data.tokenizer.decode(tokens).split("<|endoftext|>")
    assert sorted(documents) == sorted(texts.values()) and documents != list(texts.values()) and not rest
    # Three quarters to learn from; a part of a window is dropped at both ends.
    cut = len(tokens) - round(len(tokens) / 4)
    train, held_out = tokens_of(data.train), tokens_of(data.validation)
    assert train == tokens[: cut // 16 * 16] and held_out == tokens[cut:][: (len(tokens) - cut) // 16 * 16]
    seen = [tuple(row) for batch in data.train_dataloader() for row in batch["input_ids"].tolist()]
    assert sorted(seen) == sorted(tuple(train[start : start + 16]) for start in range(0, len(train), 16))
    assert seen[0] != tuple(train[:16])

    again = make_data(tmp_path / "cache", **options, context_size=32)
    again.setup("fit")
    assert (folder / "train").stat().st_mtime_ns == written_at and tokens_of(again.train)[:160] == train[:160]
    by_file = make_data(tmp_path / "cache", text_files=options["text_files"], validation_files=[f"{tmp_path}/07.txt"])
    by_file.setup("fit")
    assert by_file.tokenizer.decode(tokens_of(by_file.validation)) in texts["07.txt"] + "<|endoftext|>"
    assert texts["07.txt"] not in (trained := by_file.tokenizer.decode(tokens_of(by_file.train)))
    assert all(trained.count(text) == 1 for text in list(texts.values())[8:10])
    (tmp_path / "00.txt").write_text("Another text.")
    make_data(tmp_path / "cache", **options)
    assert len(list((tmp_path / "cache").glob("gpt-*"))) == 3, "another text is another folder"


def test_a_data_set_has_columns_and_splits(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    texts = list(write_files(tmp_path).values())
    for split, rows in {"train": texts[:-1], "test": texts[-1:]}.items():
        lines = (json.dumps({"number": number, "body": text}) + "\n" for number, text in enumerate([*rows, None]))
        (folder / f"{split}.jsonl").write_text("".join(lines))
    given = make_data(tmp_path, text_files=[str(PAGES)])
    given.setup("fit")
    known = str(next(tmp_path.glob("gpt-*")) / "tokenizer")
    options = {"dataset_name": str(folder), "validation_split": "test", "pretrained_tokenizer": known}
    data = make_data(tmp_path, text_column="body", **options)
    data.setup("fit")
    assert data.tokenizer.get_vocab() == given.tokenizer.get_vocab()
    assert texts[-1].startswith(data.tokenizer.decode(tokens_of(data.validation)))
    assert len(tokens_of(data.train)) > 8 * len(tokens_of(data.validation))
    for wrong, message in {
        "text": r"text_column='text' is not one of .*'body'",
        "number": "rank 0: ValueError: text input must be",
    }.items():
        with pytest.raises(RuntimeError, match=message):
            make_data(tmp_path, text_column=wrong, **options).setup("fit")
    with pytest.raises(ValueError, match="two sources; leave one out"):
        TextData(dataset_name=str(folder), text_files=[str(PAGES)])
    short = make_data(tmp_path, text_column="body", **options, context_size=10_000)
    with pytest.raises(ValueError, match="less than one window of context_size=10000"):
        short.setup("fit")
    before = sorted(tmp_path.iterdir())
    (tmp_path / "empty.none").touch()
    with pytest.raises(RuntimeError, match="the train text is empty"):
        make_data(tmp_path, text_files=[f"{tmp_path}/empty.none"]).setup("fit")
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "empty.none"])
    trainer, module = mock.Mock(datamodule=data), GPT(vocab_size=300, width=8, layers=1, heads=1)
    module.trainer = trainer
    with pytest.raises(ValueError, match=r"model\.vocab_size is 300, but the data needs 400"):
        module.on_fit_start()


def _prepare(folder: str, name: str, on_all_ranks: bool) -> list[int] | str:
    """What a rank has, or the error that it raises."""
    data = TextData(text_files=[f"{folder}/{name}"], vocab_size=400, context_size=16, cache_dir=f"{folder}/cache")
    if on_all_ranks or dist.get_rank() == 0:
        data.prepare_data()
    try:
        data.setup("fit")
    except RuntimeError as error:
        return str(error)
    return tokens_of(data.train)


def test_ranks_share_the_tokens_and_the_error_of_the_first(gloo: ProcessPool, tmp_path: Path) -> None:
    write_files(tmp_path)
    first, second = gloo.run(_prepare, str(tmp_path), "*.txt", True, world_size=2)
    assert first == second and len(first) > 1000
    assert len(list((tmp_path / "cache").glob("gpt-*"))) == 1, "both wrote, one was kept, and nothing else is left"
    assert gloo.run(_prepare, str(tmp_path), "*.txt", False, world_size=2) == [first, first]
    errors = gloo.run(_prepare, str(tmp_path), "*.none", False, world_size=2)
    assert errors[0] == errors[1] and "rank 0: FileNotFoundError: no file matches" in errors[0]


SIZES = {"width": 32, "layers": 2, "heads": 2, "vocab-size": 400, "context-size": 32, "batch-size": 4}
CONFIGURATIONS = {
    "gpt": [],
    "pipeline": [],
    "two_nodes_slow_link": ["--trainer.accelerator=cpu", "--trainer.devices=1"],
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tokens are, of all configurations."""
    return tmp_path_factory.mktemp("gpt")


def _fit(name: str, shared: Path, folder: Path, *more: str) -> str:
    """What both ranks print; the files are below ``folder``."""
    sizes = {key.replace("-", "_"): value for key, value in SIZES.items()}
    options = {f"{'data' if key == 'batch_size' else 'model'}.{key}": value for key, value in sizes.items()}
    options |= {f"data.{key}": sizes[key] for key in ("vocab_size", "context_size")} | {"data.text_files": f"[{PAGES}]"}
    options |= {"trainer.max_steps": 12, "trainer.val_check_interval": 6, "trainer.limit_val_batches": 2}
    options |= {"data.cache_dir": shared, "model.sample_tokens": 5, "trainer.enable_progress_bar": "false"}
    words = [f"--{key}={value}" for key, value in options.items()] + CONFIGURATIONS[name]
    return run_program(
        *("-m", "lightning_muon", "fit", "--config", RECIPE / f"{name}.yaml", *words, *more),
        directory=folder,
        num_ranks=2,
        num_nodes=2 if name.startswith("two_nodes") else 1,
    )


def _losses(folder: Path) -> list[str]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [row["val_loss"] for row in csv.DictReader(file) if row["val_loss"]]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_trains_and_writes(name: str, shared: Path, tmp_path: Path) -> None:
    keep_all = ["--trainer.callbacks.init_args.save_top_k=-1"] if name == "gpt" else []
    printed = _fit(name, shared, tmp_path, *keep_all)
    (folder,) = tmp_path.glob("outputs/*/version_0")
    first, second = losses = _losses(folder)
    assert float(second) < float(first) < 6.1, "a guess has log(400) = 5.99"
    samples = json.loads((folder / "samples.json").read_text())
    assert [sample["step"] for sample in samples] == [12, 6] and all(sample["text"] for sample in samples)
    expected = {"gpt": "ParallelMuon", "pipeline": "Conv1D", "two_nodes_slow_link": "2 nodes, "}
    assert expected[name] in printed
    if name == "gpt":
        (checkpoint,) = folder.glob("checkpoints/step=6-*")
        main(["convert", str(checkpoint), str(tmp_path / "gpt.ckpt")])
        GPT.load_from_checkpoint(tmp_path / "gpt.ckpt").gpt.save_pretrained(tmp_path / "model")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.vocab_size == 400
        assert AutoTokenizer.from_pretrained(folder / "tokenizer").eos_token == "<|endoftext|>"
        _fit(name, shared, tmp_path, f"--ckpt_path={checkpoint}")
        assert _losses(folder.with_name("version_1")) == losses[1:], "the same windows as without an interruption"


def _run_accelerate(arguments: list[str]) -> str:
    """What the script prints, started as by ``lightning-muon launch``."""
    printed = io.StringIO()
    with (
        fsdp2_on_cpu(replicate_size=1, shard_size=2),
        mock.patch.object(accelerate, "Accelerator", lightning_muon.accelerate.Accelerator),
        mock.patch("sys.argv", ["accelerate_gpt.py", *arguments]),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(RECIPE / "accelerate_gpt.py"), run_name="__main__")
    return printed.getvalue()


def test_the_accelerate_twin_trains_resumes_and_exports(gloo: ProcessPool, shared: Path, tmp_path: Path) -> None:
    options = SIZES | {"validation-batches": 2, "validate-every": 4, "cache": shared, "output": tmp_path}
    words = [f"--{key}={value}" for key, value in options.items()] + ["--text-files", str(PAGES)]
    whole = gloo.run(_run_accelerate, [*words, "--steps=12"], world_size=2)[0]
    losses = [float(loss) for loss in re.findall(r"validation loss (\S+)", whole)]
    assert len(losses) == 3 and losses[2] < losses[0] < 6.1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = tokenizer("The optimizer", return_tensors="pt")
    assert torch.isfinite(model(**tokens, labels=tokens["input_ids"]).loss)
    # Goes on from step 12 of the same schedule's end.
    resumed = gloo.run(_run_accelerate, [*words, "--steps=16", "--resume"], world_size=2)[0]
    assert re.findall(r"step (\d+)", resumed) == ["16"]


def test_both_read_their_halves_of_the_config() -> None:
    path = str(RECIPE / "accelerate.yaml")
    assert Options.from_file(path).optimizer == lightning_muon.MuonConfig()
    with split_config(path) as rest:
        config = load_config_from_file(rest)
    assert (config.num_processes, config.parallelism_config["parallelism_config_dp_shard_size"]) == (4, 4)
