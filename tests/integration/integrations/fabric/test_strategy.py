"""Fabric programs with several models, with activation checkpointing, and with ranks that do not do the same."""

import time
from collections.abc import Callable, Sequence
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
from tests.integration.training import Network, adamw, loss_of, max_difference
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


# Kind -> groups of passes of each step, a pass by its micro-batch and the models whose loss it is. All forward passes
# of a group come before its backward passes; then its models step, or of "thrown away" only those of the last group.
_PASSES: dict[str, list[list[tuple[int, list[int]]]]] = {
    "shared loss": [[(0, [0, 1])], [(1, [0])]],
    "own losses": [[(0, [0]), (1, [1])]],
    "thrown away": [[(0, [0])], [(1, [0])]],
}


def _train(
    kind: str,
    models: Sequence[Any],
    optimizers: Sequence[Any],
    loss: Callable[[Tensor, Tensor], Tensor],
    backward: Callable[[Tensor, Tensor], None],
    own_rows: Callable[[Any], Any],
) -> None:
    for step in range(3):
        for number, group in enumerate(_PASSES[kind]):
            passes = list[tuple[Tensor, Tensor]]()
            for index, used in group:
                tokens, targets = loop.micro_batch(step, index)
                targets[:, _NUM_KEPT[index] :] = -100
                tokens, targets = own_rows((tokens, targets))
                logits: Any = sum(models[each](tokens) for each in used)
                passes.append((loss(logits, targets), targets))
            for each in passes:
                backward(*each)
            for each in {each for _, used in group for each in used}:
                if kind != "thrown away" or number == 1:
                    optimizers[each].step()
                optimizers[each].zero_grad()


def _with_fabric(kind: str, sharding: str) -> list[dict[str, Tensor]]:
    """Two models that share a loss, or have one each with its own tokens; or one whose first pass is thrown away."""
    has_tokens = kind != "shared loss"
    fabric = loop.launch(sharding=sharding, **({"loss_scaling": "tokens"} if has_tokens else {}))
    pairs: list[Any] = [fabric.setup(module, adamw(module)) for module in map(loop.network, range(2))]

    def backward(loss: Tensor, targets: Tensor) -> None:
        if has_tokens:
            fabric.strategy.report_tokens((targets != -100).sum())
        fabric.backward(loss)

    loss = loop.summed_loss if has_tokens else loss_of
    _train(kind, *zip(*pairs, strict=True), loss, backward, loop.own_rows)
    result = [loop.weights(model) for model, _ in pairs]
    fabric.strategy.teardown()
    return result


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
@pytest.mark.parametrize("kind", _PASSES)
def test_models_train_as_one_process_does(gloo: ProcessPool, kind: str, sharding: str) -> None:
    found = gloo.run(_with_fabric, kind, sharding, world_size=2)[0]
    modules = [loop.network(0), loop.network(1)]
    optimizers = [
        MuonAndAdamW(each, loop.MATRICES, muon_lr_factor=MEASURED_MUON_LR_FACTOR, **loop.HYPER) for each in modules
    ]
    _train(kind, modules, optimizers, loss_of, lambda loss, _: loss.backward(), lambda batch: batch)
    for ours, module in zip(found, modules, strict=True):
        assert max_difference(ours, dict(module.state_dict())) <= _TOLERANCE


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
    assert last == "lightning_muon: rank 1 ends: rank 0 has failed: OSError: file 4"
