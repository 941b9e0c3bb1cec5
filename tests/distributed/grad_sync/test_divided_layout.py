"""Divided state in a state_dict: whole shapes, for any number of ranks and for other layouts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.sharding.training import Run, Training, largest_difference, mesh_of
from tests.support.processes import ProcessPool


def _bits_after_reloading(first: str, second: str, shape: tuple[int, ...]) -> bool:
    """Two steps, then the state goes through a state_dict to a new training, which takes two more."""
    run = Run(max_norm=0.5)
    old = Training.start(first, mesh_of(shape), bucket_bytes=600)
    for step in range(2):
        old.step(run, step)
    new = Training.start(second, mesh_of(shape), bucket_bytes=900)
    with torch.no_grad():
        for mine, weight in zip(new.net.parameters(), old.weights().values(), strict=True):
            mine.copy_(weight)
    # A loaded state shares memory with what it was loaded from.
    new.optimizer.load_state_dict(copy.deepcopy(_whole(old) if first != second else old.optimizer.state_dict()))
    for step in range(2, 4):
        old.step(run, step)
        new.step(run, step)
    return largest_difference(old.weights(), new.weights())[0]


def _whole(training: Training) -> dict[str, Any]:
    """The state_dict with plain tensors, as one process would save it."""
    packed = training.optimizer.state_dict()
    for state in packed["state"].values():
        state.update({key: v.full_tensor() for key, v in state.items() if isinstance(v, DTensor)})
    return packed


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
def test_a_state_dict_continues_bit_equal(gloo: ProcessPool, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel()
    assert gloo.run(_bits_after_reloading, "zero2", "zero2", shape, world_size=size) == [0.0] * size


@pytest.mark.parametrize(("first", "second"), [("zero2", "ddp"), ("ddp", "zero2")])
def test_whole_states_can_be_loaded(gloo: ProcessPool, first: str, second: str) -> None:
    for difference in gloo.run(_bits_after_reloading, first, second, (3,), world_size=3):
        assert difference < 1e-6
