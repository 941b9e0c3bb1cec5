"""What ranks must know of each other before a step travels in two messages; what one rank changes reaches all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.sharding.test_traffic import MESSAGE, Wire
from tests.distributed.sharding.training import Training, mesh_of
from tests.support.processes import ProcessPool

FLEXDEMO = [("flexdemo", (2, 2)), ("flexdemo", (4, 1))]


def _notes_of_fourth_step(name: str, shape: tuple[int, ...]) -> int:
    """Collectives of whole numbers and of objects: what is no gradient, update, value or norm."""
    training = Training.start(name, mesh_of(shape))
    for step in range(4):
        with Wire() as wire:
            training.backward(step)
            training.mode.clip_grad_norm_(training.optimizer, 1.0)
            training.optimizer.step()
    training.mode.finish_parameters()
    # Nodes send each other bytes.
    return sum(not each.is_payload and each.operator not in (MESSAGE, "recv_") for each in wire.sent)


@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, shape) for name in ("fsdp", "zero2") for shape in ((4,), (2, 2))), ("ddp", (4,)), *FLEXDEMO],
)
def test_two_notes_to_each_other_are_sent_in_a_step(gloo: ProcessPool, name: str, shape: tuple[int, ...]) -> None:
    """One ends the reduction of gradients, with FSDP2 where a node has several ranks; the other begins the step."""
    assert set(gloo.run(_notes_of_fourth_step, name, shape, world_size=4)) == {1 if shape == (4, 1) else 2}


# What a callback on one rank may do between the end of backward and the step.
CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "gradient is gone": lambda weight, _: setattr(weight, "grad", None),
    "gradient is new": lambda _, training: setattr(training.net.tail.unused.weight, "grad", torch.ones(5, 3)),
    "NaN": lambda weight, _: weight.grad.mul_(float("nan")),
    "frozen": lambda weight, _: weight.requires_grad_(False),
    "state is gone": lambda weight, training: training.optimizer.state.pop(weight),
    "momentum is wrong": lambda _, training: training.optimizer.param_groups[0].update(momentum="much"),
    "gradients are gone": lambda _, training: training.optimizer.zero_grad(),
}
KINDS = {
    "ddp": ["gradient is gone", "gradient is new", "NaN", "frozen", "state is gone"],
    "zero2": ["state is gone", "momentum is wrong", "gradients are gone", "frozen"],
    "fsdp": ["gradient is gone", "NaN", "frozen", "state is gone"],
}


def _changed_on_one_rank(name: str, kind: str) -> tuple[list[Tensor], int, str]:
    training, error = Training.start(name, mesh_of((2,))), ""
    for step in range(3):
        training.backward(step)
        if step == 2 and dist.get_rank() == 1:
            CHANGES[kind](training.net.blocks[0].up.weight, training)  # type: ignore[union-attr]
        try:
            training.optimizer.step()
        except (RuntimeError, ValueError) as problem:
            error = str(problem)
    return list(training.weights().values()), training.optimizer.skipped_steps, error


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in KINDS.items() for kind in kinds])
def test_what_one_rank_changes_before_the_step_reaches_all(gloo: ProcessPool, name: str, kind: str) -> None:
    (first, skipped, error), (second, other_skipped, other_error) = gloo.run(
        _changed_on_one_rank, name, kind, world_size=2
    )
    assert skipped == other_skipped == (kind == "NaN")
    assert bool(error) == bool(other_error) == (kind in ("frozen", "momentum is wrong", "state is gone"))
    assert all(map(torch.equal, first, second))
