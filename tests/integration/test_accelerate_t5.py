"""The example with Accelerate, a few rows long."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import torch
from accelerate.commands.config.config_args import load_config_from_file
from transformers import T5ForConditionalGeneration

import lightning_muon.accelerate
from lightning_muon.cli.launch import split_config
from lightning_muon.engine.options import Options
from tests.recipes.rows import write_csv
from tests.support.accelerate_cpu import fsdp2_on_cpu
from tests.support.processes import ProcessPool

_EXAMPLES = Path(lightning_muon.__file__).parents[1] / "examples"
_SMALL = {"epochs": 2, "width": 16, "layers": 1, "vocabulary": 400, "batch": 2, "rows": 24, "validation-rows": 8}


def _run(arguments: list[str]) -> str:
    """What the script prints, started as by ``lightning-muon launch``."""
    printed = io.StringIO()
    with (
        fsdp2_on_cpu(replicate_size=2, shard_size=2),
        mock.patch.object(accelerate, "Accelerator", lightning_muon.accelerate.Accelerator),
        mock.patch("sys.argv", ["accelerate_t5.py", *arguments]),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(_EXAMPLES / "accelerate_t5.py"), run_name="__main__")
    return printed.getvalue()


def _losses(printed: str) -> dict[str, float]:
    lines = (line.split(": validation loss ") for line in printed.splitlines() if "validation loss" in line)
    return {what: float(loss) for what, loss in lines}


def test_the_example_learns_saves_and_resumes(gloo: ProcessPool, tmp_path: Path) -> None:
    options: dict[str, Any] = _SMALL | {"source": write_csv(tmp_path), "cache": tmp_path, "output": tmp_path / "out"}
    arguments = [f"--{key}={value}" for key, value in options.items()]
    losses = _losses(gloo.run(_run, arguments, timeout=170.0)[0])
    assert losses.keys() == {"untrained", "epoch 1", "epoch 2"}
    assert losses["epoch 2"] < losses["untrained"]
    # The epochs are over: what is printed first is the loss of the weights that were loaded.
    resumed = _losses(gloo.run(_run, [*arguments, "--resume"], timeout=170.0)[0])
    assert resumed == {"untrained": losses["epoch 2"]}
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "out" / "model")
    assert model.get_input_embeddings().weight.shape == (400, 16)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert not torch.equal(model.shared.weight, torch.zeros_like(model.shared.weight))


def test_both_read_their_halves_of_the_config() -> None:
    path = str(_EXAMPLES / "accelerate_t5.yaml")
    assert Options.from_file(path).optimizer == lightning_muon.MuonConfig()
    with split_config(path) as rest:
        config = load_config_from_file(rest)
    assert (config.num_processes, config.distributed_type.value) == (4, "FSDP")
    sizes = config.parallelism_config
    assert [sizes[f"parallelism_config_dp_{axis}_size"] for axis in ("replicate", "shard")] == [2, 2]
