"""The examples: those of Trainers of transformers and of Accelerate are a few rows long, migrations train as before."""

import difflib
import importlib
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning import seed_everything
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from transformers import AutoModelForCausalLM, T5ForConditionalGeneration

import lightning_muon
from examples.causal_lm_trainer import library_text, main
from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from tests.integration.integrations.accelerate.loop import run_script
from tests.integration.integrations.transformers.runs import accelerator_of
from tests.recipes.rows import write_csv
from tests.reference.muon_and_adamw import muon_and_adamw
from tests.support.processes import ProcessPool
from tests.support.programs import ROOT, run_program


def _run_trainer(directory: str, parallel: str, *words: str) -> float:
    small = {"hidden_size": 64, "num_layers": 2, "block_size": 32, "vocab_size": 300}
    quiet = {"report_to": "none", "disable_tqdm": True, "per_device_train_batch_size": 8, "save_steps": 10}
    places = {"text_file": f"{directory}/text.txt", "output_dir": f"{directory}/out"}
    options = small | quiet | places | {"use_cpu": True, "muon_lr": 1e-2, "max_steps": 20}
    with accelerator_of(parallel):
        metrics = main([*(word for name, value in options.items() for word in (f"--{name}", str(value))), *words])
    return metrics["eval_loss"]


def test_the_example_learns_goes_on_and_saves_a_model(gloo: ProcessPool, tmp_path: Path) -> None:
    Path(tmp_path, "text.txt").write_text(library_text()[:20000])
    losses = gloo.run(_run_trainer, str(tmp_path), "fsdp", world_size=2)
    # log(300) is 5.7.
    assert max(losses) < 4.5 and len(set(losses)) == 1
    resume = ("--resume_from_checkpoint", f"{tmp_path}/out/checkpoint-10")
    assert gloo.run(_run_trainer, str(tmp_path), "fsdp", *resume, world_size=2) == losses
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.num_hidden_layers == 2


_EXAMPLES = ROOT / "examples"
_SMALL = {"epochs": 2, "width": 16, "layers": 1, "vocabulary": 400, "batch": 2, "rows": 24, "validation-rows": 8}


def _losses(printed: str) -> dict[str, float]:
    lines = (line.split(": validation loss ") for line in printed.splitlines() if "validation loss" in line)
    return {what: float(loss) for what, loss in lines}


def test_the_example_learns_saves_and_resumes(gloo: ProcessPool, tmp_path: Path) -> None:
    options: dict[str, Any] = _SMALL | {"source": write_csv(tmp_path), "cache": tmp_path, "output": tmp_path / "out"}
    arguments = [f"--{key}={value}" for key, value in options.items()]

    def run(*more: str) -> dict[str, float]:
        words = [*arguments, *more]
        return _losses(gloo.run(run_script, _EXAMPLES / "accelerate_t5.py", words, world_size=2, timeout=170.0)[0])

    losses = run()
    assert losses.keys() == {"untrained", "epoch 1", "epoch 2"}
    assert losses["epoch 2"] < losses["untrained"]
    # The epochs are over: what is printed first is the loss of the weights that were loaded.
    assert run("--resume") == {"untrained": losses["epoch 2"]}
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "out" / "model")
    assert model.get_input_embeddings().weight.shape == (400, 16)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("optimizer", ["auto", "keep"])
def test_the_first_run_reports_loss_and_speed(tmp_path: Path, optimizer: str) -> None:
    printed = run_program(_EXAMPLES / "first_run.py", optimizer, directory=tmp_path, num_ranks=2)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+), [\d.]+ s per step, [\d,]+ tokens/s", printed)]
    # log(256) is 5.5.
    assert len(losses) == 2 and losses[1] < losses[0] < 5.5


_MIGRATION = _EXAMPLES / "migration"
_PAIRS = sorted(path.parent / path.name.replace("before", "after") for path in _MIGRATION.glob("*/before.*"))


@pytest.mark.parametrize("after", _PAIRS, ids=lambda path: str(path.relative_to(_MIGRATION)))
def test_a_migration_changes_at_most_six_lines(after: Path) -> None:
    before = after.with_stem("before").read_text().splitlines()
    changes = [line for line in difflib.ndiff(before, after.read_text().splitlines()) if line[:1] in "+-"]
    assert 0 < len(changes) <= 6, "\n".join(changes)


def _train(name: str, **options: Any) -> dict[str, Tensor]:
    """Weights on rank 0 after ``main`` of a program, with Newton-Schulz in float32, which agrees to the 6th digit."""
    program = importlib.import_module(f"examples.migration.{name}")
    with mock.patch("lightning_muon.optim.parallel_muon.cpu_multiplies_bfloat16_fast", return_value=False):
        model = program.main(**options)
    weights = lightning_muon.full_state_dict(getattr(model, "module", model))
    return {key: value.clone() for key, value in weights.items()}


def _loop_of_torch(name: str) -> tuple[nn.Module, list[Tensor]]:
    """Its model, and the batches of both ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50))
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    return model, [torch.cat([torch.randint(50, (8,), generator=one) for one in generators]) for _ in range(10)]


def _of_lightning(name: str) -> tuple[nn.Module, list[Tensor]]:
    """Data are shuffled as Lightning does."""
    seed_everything(0)
    model, tokens, batches = importlib.import_module(f"examples.migration.{name}").Model(), torch.arange(48), []
    for epoch in range(2):
        sampler = DistributedSampler(tokens, num_replicas=1, rank=0, shuffle=True, seed=0)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        batches += tokens[list(sampler)].split(8)
    return model, batches


_QUIET = {
    "accelerator": "cpu",
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
}


@pytest.mark.parametrize(
    ("source", "make", "options", "factor", "max_norm", "warm"),
    [
        ("from_ddp_adamw", _loop_of_torch, {}, MEASURED_MUON_LR_FACTOR, 0.5, 5),
        ("from_torch_muon", _loop_of_torch, {}, 1.0, math.inf, 0),
        ("from_lightning_fsdp", _of_lightning, _QUIET, MEASURED_MUON_LR_FACTOR, math.inf, 0),
        ("from_deepspeed", _of_lightning, _QUIET, MEASURED_MUON_LR_FACTOR, math.inf, 0),
    ],
)
def test_what_it_becomes_trains_as_one_process(
    gloo: ProcessPool, source: str, make: Any, options: dict[str, Any], factor: float, max_norm: float, warm: int
) -> None:
    """``warm`` steps of LinearLR."""
    model, batches = make(f"{source}.after")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    matrices = [name for name in start if name.endswith(("up.weight", "down.weight")) or name == "1.weight"]
    optimizer = muon_and_adamw(model, matrices, lr=1e-2, muon_lr_factor=factor)
    optimizer.muon.adjust_lr_fn = "original" if source == "from_torch_muon" else optimizer.muon.adjust_lr_fn
    for step, tokens in enumerate(batches):
        rate = 1e-2 * (1.0 if step >= warm else 1 / 3 + (1 - 1 / 3) * step / warm)
        optimizer.set_rate(rate)
        F.cross_entropy(getattr(model, "layers", model)(tokens), (tokens + 1) % 50).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        model.zero_grad()
    found = gloo.run(_train, f"{source}.after", world_size=2, **options)[0]
    # Of the way of a weight in the training: AdamW makes much of the last digit of a gradient that is almost 0.
    for name, end in model.state_dict().items():
        assert (found[name] - end).norm() < 1e-3 * (end - start[name]).norm(), name


@pytest.mark.long
def test_the_examples_of_pipelines_run(tmp_path: Path) -> None:
    def run(name: str, *words: str, num_ranks: int = 2) -> str:
        return run_program(_EXAMPLES / f"{name}.py", *words, directory=tmp_path, num_ranks=num_ranks)

    trained = run("pipeline_gpt", "--steps", "2", "--shard-size", "1", "--schedule", "zb_h1")
    assert "validation loss" in trained
    assert "loss " in run("pipeline_t5", "--steps", "2")
    loop = run("pipeline_loop", "--steps", "2")
    assert "step 2: loss" in loop and "The statement " in loop
    assert "\ndual_pipe_v            2    26.80" in run("schedules", num_ranks=1)
