"""Programs that know nothing of this package, among them those of the transformers Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import transformers.trainer
from torch import Tensor

from lightning_muon import FlexDeMo, ParallelMuon
from lightning_muon.cli.launch import replace_accelerator
from lightning_muon.integrations.accelerate.accelerator import Accelerator
from tests.integration.integrations.transformers import runs
from tests.integration.training import max_difference
from tests.support.processes import ProcessPool

_EXACT = "optimizer: {compute_dtype: float32, wire_dtype: float32}\n"
_FLEXDEMO = "optimizer: {class_path: lightning_muon.FlexDeMoConfig, init_args: {base: adamw}}\n"


def _trained(directory: str, parallel: str, *, resume: str = "", **options: Any) -> tuple[str, dict[str, Tensor]]:
    """The optimizer and the weights of a Trainer that was told of AdamW."""
    with (
        mock.patch.object(accelerate, "Accelerator", accelerate.Accelerator),
        mock.patch.object(accelerate.accelerator, "Accelerator", accelerate.Accelerator),
        mock.patch.object(transformers.trainer, "Accelerator", accelerate.Accelerator),
        runs.accelerator_of(parallel),
        mock.patch.dict(os.environ, {"LIGHTNING_MUON_CONFIG": f"{directory}/options.yaml"}),
    ):
        replace_accelerator()
        run = runs.trainer(
            f"{directory}/out",
            runs.causal_lm(seed=int(os.environ["RANK"]) if parallel != "none" and not resume else 0),
            optimizer_cls_and_kwargs=None,
            learning_rate=runs.LR,
            weight_decay=runs.WEIGHT_DECAY,
            accumulate=2,
            **options,
        )
        assert isinstance(run.accelerator, Accelerator)
        run.train(resume_from_checkpoint=resume or None)
        result = type(run.optimizer.optimizer).__name__, runs.whole_weights(run.model)
        run.accelerator.free_memory()
        return result


@pytest.mark.parametrize(("world_size", "parallel"), [(1, "none"), (4, "hsdp"), (2, "ddp")])
def test_an_unchanged_trainer_trains_with_parallel_muon(
    gloo: ProcessPool, tmp_path: Path, world_size: int, parallel: str
) -> None:
    (tmp_path / "options.yaml").write_text(_EXACT + ("sharding: ddp\n" if parallel == "ddp" else ""))
    found = gloo.run(_trained, str(tmp_path), parallel, max_grad_norm=0.1, world_size=world_size)[0]
    assert found[0] == ParallelMuon.__name__
    expected = runs.written_out(max_norm=0.1)
    assert max_difference(expected, runs.written_out()) > 1e-4
    assert max_difference(found[1], expected) <= 1e-6


@pytest.mark.parametrize(
    ("world_size", "parallel", "text"), [(4, "hsdp", _FLEXDEMO), (2, "ddp", f"{_EXACT}sharding: ddp\n")]
)
def test_an_unchanged_trainer_resumes_bit_for_bit(
    gloo: ProcessPool, tmp_path: Path, world_size: int, parallel: str, text: str
) -> None:
    (tmp_path / "options.yaml").write_text(text)
    saving = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    name, whole = gloo.run(_trained, str(tmp_path), parallel, world_size=world_size, **saving)[0]
    checkpoint = str(tmp_path / "out" / "checkpoint-4")
    _, resumed = gloo.run(_trained, str(tmp_path), parallel, resume=checkpoint, world_size=world_size)[0]
    assert name == (FlexDeMo if text == _FLEXDEMO else ParallelMuon).__name__
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)


@pytest.mark.parametrize("text", ["sharding: zero2\n", _FLEXDEMO])
def test_a_division_that_a_trainer_would_not_save_is_refused(gloo: ProcessPool, tmp_path: Path, text: str) -> None:
    (tmp_path / "options.yaml").write_text(text)
    gloo.expect_error_on_all_ranks(_trained, str(tmp_path), "ddp", match="set distributed_type: FSDP", world_size=2)
