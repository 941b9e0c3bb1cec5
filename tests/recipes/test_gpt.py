"""The GPT recipe: each of its configurations on two processes, on the pages of docs/."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.gpt.model import GPT
from tests.integration.integrations.accelerate.loop import run_script
from tests.support.processes import ProcessPool
from tests.support.programs import ROOT, run_program

RECIPE = ROOT / "recipes" / "gpt"
PAGES = ROOT / "docs" / "*.md"
SIZES = {"width": 32, "layers": 2, "heads": 2, "vocab-size": 400, "context-size": 32, "batch-size": 4}
CONFIGURATIONS = {
    "gpt": [],
    "pipeline": [],
    "experts": ["--trainer.devices=2"],
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
        *("-m", "lightning_muon", "fit", *(["--config", RECIPE / "gpt.yaml"] if name == "experts" else [])),
        *("--config", RECIPE / f"{name}.yaml", *words, *more),
        directory=folder,
        num_ranks=2,
        num_nodes=2 if name.startswith("two_nodes") else 1,
    )


def _losses(folder: Path) -> list[str]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [row["val_loss"] for row in csv.DictReader(file) if row["val_loss"]]


@pytest.mark.long
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_trains_and_writes(name: str, shared: Path, tmp_path: Path) -> None:
    keep_all = ["--trainer.callbacks.init_args.save_top_k=-1"] if name == "gpt" else []
    printed = _fit(name, shared, tmp_path, *keep_all)
    (folder,) = tmp_path.glob("outputs/*/version_0")
    first, second = losses = _losses(folder)
    assert float(second) < float(first) < 6.1, "a guess has log(400) = 5.99"
    samples = json.loads((folder / "samples.json").read_text())
    assert [sample["step"] for sample in samples] == [12, 6] and all(sample["text"] for sample in samples)
    expected = {"gpt": "ParallelMuon", "pipeline": "Conv1D", "experts": "mlp.gate.weight"}
    expected["two_nodes_slow_link"] = "2 nodes, "
    assert expected[name] in printed
    if name == "gpt":
        (checkpoint,) = folder.glob("checkpoints/step=6-*")
        GPT.load_from_checkpoint(checkpoint).gpt.save_pretrained(tmp_path / "model")
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.vocab_size == 400
        assert AutoTokenizer.from_pretrained(folder / "tokenizer").eos_token == "<|endoftext|>"
        _fit(name, shared, tmp_path, f"--ckpt_path={checkpoint}")
        assert _losses(folder.with_name("version_1")) == losses[1:], "the same windows as without an interruption"


def test_the_accelerate_twin_trains_resumes_and_exports(gloo: ProcessPool, shared: Path, tmp_path: Path) -> None:
    options = SIZES | {"validation-batches": 2, "validate-every": 4, "cache": shared, "output": tmp_path}
    words = [f"--{key}={value}" for key, value in options.items()] + ["--text-files", str(PAGES)]
    whole = gloo.run(run_script, RECIPE / "accelerate_gpt.py", [*words, "--steps=12"], world_size=2)[0]
    losses = [float(loss) for loss in re.findall(r"validation loss (\S+)", whole)]
    assert len(losses) == 3 and losses[2] < losses[0] < 6.1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = tokenizer("The optimizer", return_tensors="pt")
    assert torch.isfinite(model(**tokens, labels=tokens["input_ids"]).loss)
    # Goes on from step 12 of the same schedule's end.
    resumed = gloo.run(run_script, RECIPE / "accelerate_gpt.py", [*words, "--steps=16", "--resume"], world_size=2)[0]
    assert re.findall(r"step (\d+)", resumed) == ["16"]
