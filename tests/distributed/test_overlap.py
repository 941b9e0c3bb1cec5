"""Transfers behind arithmetic: the same weights bit for bit, whatever a program changes between the steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon import ParallelMuon
from tests.distributed.backward_passes import (
    BACKWARDS,
    Net,
    branch_on_some_ranks,
    make_optimizer,
    sharded,
)
from tests.support.processes import ProcessPool
from tests.support.tensors import weights_of


def _train(
    mesh_shape: tuple[int, ...], options: dict[str, Any], backward: Callable[[Net, ParallelMuon, int], None]
) -> dict[str, Tensor]:
    model = sharded(mesh_shape)
    optimizer = make_optimizer(model, **options)
    for step in range(4):
        backward(model, optimizer, step)
        optimizer.step()
    return weights_of(model)


def _compare(mesh_shape: tuple[int, ...], backward: Callable[..., None]) -> list[str]:
    """Names of weights that differ from those of a step without any overlap."""
    serial, weights = (_train(mesh_shape, {"overlap": overlap}, backward) for overlap in ("off", "step"))
    return [name for name in weights if not torch.equal(weights[name], serial[name])]


@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda function: function.__name__.strip("_"))
def test_overlap_gives_the_weights_of_a_serial_step(gloo: ProcessPool, backward: Callable[..., None]) -> None:
    # Where one rank differs, there are two others that do not.
    size = 3 if backward is branch_on_some_ranks else 2
    for differences in gloo.run(_compare, (size,), backward, world_size=size):
        assert differences == []
