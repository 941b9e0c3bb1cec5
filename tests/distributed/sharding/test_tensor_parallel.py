"""Models with a tensor-parallel plan, sharded further: what cannot be right is an error on all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_muon.engine.mesh_sizes import Meshes, MeshSizes
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.shard_model import check_tensor_parallel, shard_model
from tests.support.processes import ProcessPool


class Net(nn.Module):
    """Two layers for the plan, and one that is not in it."""

    def __init__(self, num_outputs: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(7, 14)
        self.down = nn.Linear(14, 7)
        self.head = nn.Linear(7, num_outputs)


def _parallelize(model: nn.Module, meshes: Meshes) -> None:
    parallelize_module(model, meshes.tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _make(sizes: dict[str, int]) -> Meshes:
    return MeshSizes(**sizes).make("cpu", num_nodes=1, num_processes=dist.get_world_size())


def _different(num_outputs: tuple[int, ...]) -> None:
    meshes = _make({"shard_size": 2, "tensor_size": 2})
    torch.manual_seed(0)
    model = Net(num_outputs=num_outputs[dist.get_rank()])
    _parallelize(model, meshes)
    shard_model(model, meshes.data, ModeOptions())


@pytest.mark.parametrize(
    ("num_outputs", "sizes"),
    # In the second case all data ranks of one tensor rank agree with each other, but not with the other tensor rank.
    [((5, 6, 5, 5), r"\(6, 7\) float32.*\(5, 7\)"), ((5, 6, 5, 6), r"\(5, 7\) float32.*\(6, 7\)")],
)
def test_a_rank_with_another_model_stops_all_tensor_ranks(
    gloo: ProcessPool, num_outputs: tuple[int, ...], sizes: str
) -> None:
    match = f"Net differs between ranks: .*'head.weight' {sizes}"
    gloo.expect_error_on_all_ranks(_different, num_outputs, match=match, exception=RuntimeError)


def _without_a_plan(has_plan: bool) -> None:
    meshes = _make({"tensor_size": 2})
    assert meshes.tensor is not None
    model = Net()
    if has_plan:
        _parallelize(model, meshes)
    for sharded in (False, True):
        if sharded:
            shard_model(model, meshes.data, ModeOptions())
        check_tensor_parallel(model, meshes.tensor)


def test_a_tensor_axis_that_divides_nothing_is_an_error(gloo: ProcessPool) -> None:
    gloo.run(_without_a_plan, True, world_size=2)
    match = r"tensor_size=2, but no layer of Net .*self\.device_mesh\['tensor'\]"
    gloo.expect_error_on_all_ranks(_without_a_plan, False, match=match, world_size=2)
