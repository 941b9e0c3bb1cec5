"""Fabric programs with several models, with activation checkpointing, and with ranks that do not do the same."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from tests.integration.integrations.fabric import loop
from tests.integration.training import Network, loss_of, max_difference
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool, RanksFailedError
from tests.support.programs import run_program

# Sums over ranks have another order than those of one process.
_TOLERANCE = 1e-6
_NUM_KEPT = (2, 5)  # Targets of a row in each micro-batch; the mean over passes is not that over tokens.


class _Recomputing(Network):
    """Checkpointing stops in the last block, whose output the loss does not use, before a backward pass enters it."""

    def __init__(self, how: dict[str, bool]) -> None:
        torch.manual_seed(0)
        super().__init__(num_blocks=3)
        self.how = how

    def _two(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.blocks[1](x), self.blocks[2](x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for part in (self.blocks[0], self._two):
            x = checkpoint(part, x, **self.how) if self.how else part(x)
        return self.head(x[0])


def _recompute(sharding: str) -> list[dict[str, Tensor]]:
    """Weights without checkpointing and with each kind of it."""
    found = []
    for how in ({}, {"use_reentrant": False}, {"use_reentrant": False, "early_stop": False}, {"use_reentrant": True}):
        fabric, module = loop.launch(sharding=sharding), _Recomputing(how)
        model, optimizer = fabric.setup(module, loop.adamw(module))
        loop.run_steps(fabric, model, optimizer)
        found.append({name: value for name, value in loop.end(fabric, model).items() if "blocks.2" not in name})
    return found


@pytest.mark.parametrize("sharding", ["fsdp", "zero2", "ddp"])
def test_activation_checkpointing_changes_nothing(gloo: ProcessPool, sharding: str) -> None:
    plain, *others = gloo.run(_recompute, sharding, world_size=2)[0]
    assert plain and all(torch.equal(weights[name], plain[name]) for weights in others for name in plain)


def _batch(step: int, index: int) -> tuple[Tensor, Tensor]:
    tokens, targets = loop.micro_batch(step, index)
    targets[:, _NUM_KEPT[index] :] = -100
    return tokens, targets


def _several(kind: str, sharding: str) -> list[dict[str, Tensor]]:
    """Two models that share a loss, or have one each with its own tokens; or one whose first pass is thrown away."""
    fabric = loop.launch(sharding=sharding, **({} if kind == "shared loss" else {"loss_scaling": "tokens"}))
    pairs: list[Any] = [fabric.setup(module, loop.adamw(module)) for module in map(loop.network, range(2))]
    (first, first_optimizer), (second, _) = pairs

    def backward(loss: Tensor, targets: Tensor) -> None:
        if kind != "shared loss":
            fabric.strategy.report_tokens((targets != -100).sum())
        fabric.backward(loss)

    def step_all(*optimizers: Any) -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for step in range(3):
        (tokens, targets), (others, other_targets) = (loop.own_rows(fabric, _batch(step, index)) for index in range(2))
        if kind == "shared loss":
            backward(loss_of(first(tokens) + second(tokens), targets), targets)
            step_all(*(optimizer for _, optimizer in pairs))
            backward(loss_of(first(others), other_targets), other_targets)  # Only one of them runs.
            step_all(first_optimizer)
        elif kind == "own losses":  # Both have run before the first backward pass.
            losses = loop.summed_loss(first(tokens), targets), loop.summed_loss(second(others), other_targets)
            backward(losses[0], targets)
            backward(losses[1], other_targets)
            step_all(*(optimizer for _, optimizer in pairs))
        else:
            backward(loop.summed_loss(first(tokens), targets), targets)
            first_optimizer.zero_grad()
            backward(loop.summed_loss(first(others), other_targets), other_targets)
            step_all(first_optimizer)
    result = [loop.weights(model) for model, _ in pairs]
    fabric.strategy.teardown()
    return result


# Kind -> for each step the micro-batches, and the models that share its loss.
_ALONE = {
    "shared loss": [(0, [0, 1]), (1, [0])],
    "own losses": [(0, [0]), (1, [1])],
    "thrown away": [(1, [0])],
}


def _alone(kind: str) -> list[dict[str, Tensor]]:
    modules = [loop.network(0), loop.network(1)]
    make = partial(MuonAndAdamW, muon_lr_factor=MEASURED_MUON_LR_FACTOR, **loop.HYPER)
    optimizers = [make(module, loop.MATRICES) for module in modules]
    for step in range(3):
        for index, used in _ALONE[kind]:
            tokens, targets = _batch(step, index)
            logits: Any = sum(modules[each](tokens) for each in used)
            loss_of(logits, targets).backward()
            for each in used:
                optimizers[each].step()
                modules[each].zero_grad()
    return [dict(module.state_dict()) for module in modules]


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
@pytest.mark.parametrize("kind", _ALONE)
def test_models_train_as_one_process_does(gloo: ProcessPool, kind: str, sharding: str) -> None:
    found = gloo.run(_several, kind, sharding, world_size=2)[0]
    for ours, alone in zip(found, _alone(kind), strict=True):
        assert max_difference(ours, alone) <= _TOLERANCE


def _clip_on_one_rank(how: dict[str, float]) -> None:
    """From the third step on rank 1 alone clips."""
    fabric, model, optimizer = loop.set_up()
    clip = partial(fabric.clip_gradients, model, optimizer, **how)
    loop.run_steps(fabric, model, optimizer, steps=range(2), clip=clip)
    loop.run_steps(fabric, model, optimizer, steps=range(2, 4), clip=clip if dist.get_rank() == 1 else None)


@pytest.mark.parametrize("how", [{"max_norm": 1.0}, {"clip_val": 1.0}])
def test_ranks_that_clip_alone_are_named_within_seconds(gloo: ProcessPool, how: dict[str, float]) -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError) as raised:
        gloo.run_fresh(_clip_on_one_rank, how, world_size=2, grace=15.0)
    assert time.monotonic() - began < 20
    if "clip_val" in how:  # Nobody waits there for other ranks; the message of the next step has it.
        match = "clipped on some ranks only: rank 0 steps the optimizer; rank 1 clips gradients"
        assert all(match in failure.message for failure in raised.value.failures.values())
        assert len(raised.value.failures) == 2
    else:
        assert "rank 0 steps the optimizer where it clips gradients in earlier steps" in str(raised.value)
        assert set(raised.value.exit_codes) == {0, 1}


_FAILS = """
import torch.distributed as dist
from tests.integration.integrations.fabric import loop
dist.init_process_group("gloo")
fabric, model, optimizer = loop.set_up(sharding="zero2")
loop.run_steps(fabric, model, optimizer, steps=range(2))
if fabric.global_rank == 0:
    raise OSError("file 4")
loop.run_steps(fabric, model, optimizer, steps=range(2, 4))
"""


def test_an_exception_of_a_rank_is_the_last_error_of_all(tmp_path: Path) -> None:
    """It is rank 0, whose process serves the store; nothing but the end of the program knows of the exception."""
    (tmp_path / "fails.py").write_text(_FAILS)
    with pytest.raises(AssertionError, match=r"exit codes \[1, 1\]") as raised:
        run_program(tmp_path / "fails.py", directory=tmp_path, num_ranks=2)
    *_, last = str(raised.value).strip().splitlines()
    assert "[rank0]: OSError: file 4" in str(raised.value)
    assert last == "lightning_muon: rank 1 ends: rank 0 has failed: OSError: file 4"
