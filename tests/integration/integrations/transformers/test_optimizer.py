"""A transformers Trainer with ParallelMuon: weights of a training written out, resumed runs, other numbers of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers.trainer
from torch import Tensor

import lightning_muon.hf
from lightning_muon import FlexDeMoConfig, Full
from lightning_muon.integrations.accelerate.accelerator import TrainerAccelerator
from tests.integration.integrations.transformers import runs
from tests.integration.training import max_difference
from tests.support.processes import ProcessPool


def _train(directory: str, parallel: str, *, tied: bool = False, **options: Any) -> dict[str, Tensor]:
    with runs.accelerator_of(parallel):
        run = runs.trainer(directory, runs.causal_lm(tied=tied), **options)
        run.train()
        return runs.whole_weights(run.accelerator.unwrap_model(run.model))


@pytest.mark.parametrize(
    ("parallel", "world_size", "options"),
    [
        ("none", 1, {"accumulate": 2, "max_grad_norm": 0.3, "warmup_steps": 3}),
        ("ddp", 4, {"tied": True, "accumulate": 2, "max_grad_norm": 0.3}),
        ("fsdp", 4, {"tied": True, "accumulate": 2, "max_grad_norm": 0.3, "warmup_steps": 3}),
        ("hsdp", 4, {"max_grad_norm": 0.3}),
    ],
    ids=str,
)
def test_weights_are_those_of_a_training_written_out(
    gloo: ProcessPool, tmp_path: Path, parallel: str, world_size: int, options: dict[str, Any]
) -> None:
    expected = runs.written_out(
        schedule=runs.linear(options.get("warmup_steps", 0), 8),
        max_norm=options.get("max_grad_norm", 0.0),
        tied=options.get("tied", False),
    )
    for weights in gloo.run(_train, str(tmp_path), parallel, world_size=world_size, **options):
        assert max_difference(weights, expected) < 1e-6


def _train_in_two(
    directory: str, parallel: str, *, resume: str = "", variables: dict[str, str] | None = None, **options: Any
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and evaluations of eight steps, of which four are saved; or of the last four from a checkpoint."""
    with runs.accelerator_of(parallel, **(variables or {})):
        saving = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
        run = runs.trainer(directory, runs.causal_lm(seed=1 if resume else 0), **(saving | options))
        run.train(resume_from_checkpoint=resume or None)
        return runs.whole_weights(run.accelerator.unwrap_model(run.model)), runs.logged(run, "eval_loss")


@pytest.mark.parametrize(
    ("parallel", "world_size", "variables"),
    [
        ("ddp", 2, {}),
        ("fsdp", 2, {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}),
        ("fsdp", 2, {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}),
    ],
    ids=str,
)
def test_a_resumed_run_is_bit_equal(
    gloo: ProcessPool, tmp_path: Path, parallel: str, world_size: int, variables: dict[str, str]
) -> None:
    run = {"variables": variables, "accumulate": 2, "max_grad_norm": 0.3}
    weights, losses = gloo.run(_train_in_two, str(tmp_path), parallel, world_size=world_size, **run)[0]
    run["resume"] = f"{tmp_path}/checkpoint-4"
    resumed = gloo.run(_train_in_two, str(tmp_path), parallel, world_size=world_size, **run)[0]
    assert resumed[1] == losses and len(losses) == 2
    assert all(torch.equal(resumed[0][name], weights[name]) for name in weights)
    if variables.get("FSDP_STATE_DICT_TYPE") == "SHARDED_STATE_DICT":
        other, _ = gloo.run(_train_in_two, str(tmp_path), parallel, world_size=4, **run)[0]
        assert max_difference(other, runs.written_out(max_norm=0.3)) < 1e-6


def _train_again(directory: str) -> tuple[set[float], int, float]:
    with runs.accelerator_of("fsdp"):
        run = runs.trainer(directory, runs.causal_lm(), bf16=True, max_steps=4, lr_scheduler_type="constant")
        run.train()
        optimizer: Any = run.optimizer.optimizer
        run.train()
        assert run.optimizer.optimizer is optimizer
        steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
        return steps, len(optimizer.state), float(run.evaluate()["eval_loss"])


def test_a_second_call_of_train_goes_on_with_the_state(gloo: ProcessPool, tmp_path: Path) -> None:
    for steps, num_states, loss in gloo.run(_train_again, str(tmp_path), world_size=2):
        assert steps == {8.0} and num_states == len(list(runs.causal_lm().parameters()))
        # log(37) is 3.61.
        assert loss < 3.5


def _under_ours(directory: str, options: dict[str, Any], *, resume: str = "", **arguments: Any) -> dict[str, Tensor]:
    """A Trainer as it is, whose Accelerator is ours, as ``lightning-muon launch`` makes it; saves after four steps."""
    ours = partial(TrainerAccelerator, options=options)
    with runs.accelerator_of("hsdp"), mock.patch.object(transformers.trainer, "Accelerator", ours):
        model = runs.causal_lm(seed=1 if resume else 0)
        run = runs.trainer(directory, model, accumulate=2, save_strategy="steps", save_steps=4, **arguments)
        run.train(resume_from_checkpoint=resume or None)
        return runs.whole_weights(run.accelerator.unwrap_model(run.model))


_DENSE = FlexDeMoConfig(
    base="adamw", replicator=Full(), value_format="fp32", lr=runs.LR, weight_decay=runs.WEIGHT_DECAY
)


def test_flexdemo_that_sends_everything_runs_and_resumes(gloo: ProcessPool, tmp_path: Path) -> None:
    options, chosen = {"optimizer": _DENSE}, lightning_muon.hf.optimizer(_DENSE)
    weights = gloo.run(_under_ours, str(tmp_path), options, optimizer_cls_and_kwargs=chosen)[0]
    assert max_difference(weights, runs.written_out(has_muon=False)) < 1e-6
    again = {"resume": f"{tmp_path}/checkpoint-4", "optimizer_cls_and_kwargs": chosen}
    resumed = gloo.run(_under_ours, str(tmp_path), options, **again)[0]
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


def test_flexdemo_with_a_stock_accelerator_is_an_error(gloo: ProcessPool, tmp_path: Path) -> None:
    chosen = lightning_muon.hf.optimizer(_DENSE)
    gloo.expect_error_on_all_ranks(
        _train, str(tmp_path), "hsdp", optimizer_cls_and_kwargs=chosen, match="lightning-muon launch"
    )
