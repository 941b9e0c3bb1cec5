"""Formats of checkpoints, and nodes that have weights of their own; whole runs are in tests/integration."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from lightning_muon.checkpoint.nodes import (
    common_weights,
    forget_own,
    of_first_node,
    show_common,
    show_own,
    steps_left_out,
)
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo, NoReplication
from tests.support.processes import ProcessPool


def _first(shape: tuple[int, int]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    rank = dist.get_rank()
    own = torch.full((2, 3), float(rank))
    sharded = DTensor.from_local(own, mesh["shard"], [Shard(0)], run_check=False)
    state = {
        "sharded": sharded,
        "tied": sharded,
        "flags": torch.tensor([rank % 2 == 0, True]),
        "count": torch.tensor(rank),
        "empty": torch.empty(0),
    }
    found = of_first_node(state, mesh)
    assert torch.equal(own, torch.full((2, 3), float(rank))), "the weights themselves stay"
    assert found["tied"] is found["sharded"]
    return {key: value.to_local() if isinstance(value, DTensor) else value for key, value in found.items()}


@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (1, 2)])
def test_every_shard_is_that_of_the_first_node(gloo: ProcessPool, shape: tuple[int, int]) -> None:
    for rank, found in enumerate(gloo.run(_first, shape, world_size=shape[0] * shape[1])):
        first = rank % shape[1]
        assert torch.equal(found["sharded"], torch.full((2, 3), float(first)))
        assert found["flags"].tolist() == [first % 2 == 0, True]
        assert found["count"].item() == first


def _flexdemo(replicator: Any) -> tuple[Tensor, FlexDeMo]:
    weight = nn.Parameter(torch.ones(4, 4))
    return weight, FlexDeMo([weight], lr=0.5, sign=False, replicator=replicator)


def _after_one_step() -> tuple[Tensor, FlexDeMo]:
    """A weight of 0.5 whose last average is 1."""
    weight, optimizer = _flexdemo(DiLoCo(period=10))
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    assert weight.unique().tolist() == [0.5]
    return weight, optimizer


def test_only_nodes_that_have_trained_alone_have_own_weights() -> None:
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    weight, optimizer = _flexdemo(DiLoCo(period=10))
    with torch.no_grad():
        weight.fill_(7.0)
    with common_weights([sgd, _flexdemo(DCTTopK())[1], optimizer]) as differ:
        assert not differ
        assert weight.unique().tolist() == [7.0]


def _saved(optimizer: FlexDeMo) -> list[float]:
    """Weights of the node, as a checkpoint has them."""
    return optimizer.state_dict()["state"][0]["node_weights"].unique().tolist()


def test_an_average_is_shown_for_a_while() -> None:
    weight, optimizer = _after_one_step()
    assert not show_own([optimizer]), "there is nothing to undo"
    assert show_common([optimizer]) and not show_common([optimizer])
    with common_weights([optimizer]):
        assert weight.unique().tolist() == [1.0] and _saved(optimizer) == [0.5]
    assert weight.unique().tolist() == [1.0]
    assert show_own([optimizer]) and not show_own([optimizer])
    assert weight.unique().tolist() == _saved(optimizer) == [0.5]


def test_an_average_that_stays_keeps_later_changes() -> None:
    weight, optimizer = _after_one_step()
    assert show_common([optimizer], for_good=True) and not show_own([optimizer])
    assert weight.unique().tolist() == [1.0]
    with torch.no_grad():
        weight.fill_(7.0)
    with common_weights([optimizer]):
        assert weight.unique().tolist() == [7.0] and _saved(optimizer) == [0.5]
    forget_own([optimizer])
    assert weight.unique().tolist() == _saved(optimizer) == [7.0]


def test_without_averages_the_first_node_is_saved() -> None:
    weight, optimizer = _flexdemo(NoReplication())
    weight.grad = torch.ones(4, 4)
    optimizer.step()
    assert not show_common([optimizer]) and not show_common([optimizer], for_good=True)
    assert weight.unique().tolist() == [0.5]
    with common_weights([optimizer]) as must_copy:
        assert must_copy


@pytest.mark.parametrize(
    ("replicator", "expected"),
    [
        (DiLoCo(period=3), [1, 2, 0, 1, 2, 0, 1]),
        (NoReplication(), [0] * 7),
        (DCTTopK(), [0] * 7),
    ],
    ids=str,
)
def test_the_last_average_lacks_the_steps_since_it_was_begun(replicator: Any, expected: list[int]) -> None:
    weight, optimizer = _flexdemo(replicator)
    found: list[int] = []
    for _ in expected:
        weight.grad = torch.ones(4, 4)
        optimizer.step()
        found.append(steps_left_out([torch.optim.SGD([weight], lr=0.1), optimizer]))
    assert found == expected
