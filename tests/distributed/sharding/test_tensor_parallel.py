"""Models with a tensor-parallel plan, sharded further: initial weights, gradients, differences between ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_muon.engine.mesh_sizes import Meshes, MeshSizes
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.shard_model import check_tensor_parallel, shard_model
from tests.distributed.sharding.models import assert_close, attach_fsdp, full, gradients_of
from tests.support.processes import ProcessPool


class Net(nn.Module):
    """Two layers for the plan, with 7 rows on each of two tensor ranks; the rest is not in it."""

    def __init__(self, num_outputs: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(7, 14)
        self.down = nn.Linear(14, 7)
        self.norm = nn.LayerNorm(7)
        self.maybe = nn.Linear(7, 7)
        self.never = nn.Linear(7, 3)
        self.head = nn.Linear(7, num_outputs)
        self.scale = nn.Parameter(torch.rand(()))
        self.register_buffer("offset", torch.rand(7))

    def forward(self, x: Tensor, with_maybe: bool) -> Tensor:
        x = self.norm(self.down(torch.tanh(self.up(x)))) + self.offset
        x = self.maybe(x) if with_maybe else x
        return (self.head(x) * self.scale).square().mean()


def _parallelize(model: nn.Module, meshes: Meshes) -> None:
    parallelize_module(model, meshes.tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _make(sizes: dict[str, int]) -> Meshes:
    return MeshSizes(**sizes).make("cpu", num_nodes=1, num_processes=dist.get_world_size())


def _inputs() -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(5))


def _uses_maybe(data_rank: int) -> bool:
    """On torch 2.11 and 2.12 FSDP2 fails where ranks differ in what they use."""
    return data_rank == 0 or not hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def _train(sizes: dict[str, int]) -> tuple[dict[str, Any], int, dict[str, Tensor | None]]:
    """Initial weights, the axes of one, and gradients where only the first data rank uses a layer."""
    meshes = _make(sizes)
    torch.manual_seed(dist.get_rank())
    model = Net()
    _parallelize(model, meshes)
    fully_shard(model.norm, mesh=meshes.data)
    with torch.no_grad():
        model.norm.weight.to_local().add_(float(dist.get_rank() % 2))
    mode = attach_fsdp(model, meshes.data)
    weights = {name: full(tensor.clone()) for name, tensor in model.state_dict().items()}
    mine = _inputs().chunk(meshes.num_data_ranks)[meshes.data_rank]
    model(mine, _uses_maybe(meshes.data_rank)).backward()
    mode.finish_gradients()
    placements = [p.grad.placements == p.placements for p in model.parameters() if isinstance(p.grad, DTensor)]
    assert placements and all(placements)
    return weights, model.up.weight.device_mesh.ndim, gradients_of(model)


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [(2, {"tensor_size": 2}), (4, {"replicate_size": 2, "tensor_size": 2}), (4, {"context_size": 2, "tensor_size": 2})],
)
def test_weights_and_gradients_are_those_of_one_process(
    gloo: ProcessPool, world_size: int, sizes: dict[str, int]
) -> None:
    torch.manual_seed(0)
    model = Net()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # With two context ranks of one data rank both see the same samples here, so the mean over them changes nothing.
    num_data_ranks = 2 if world_size == 4 and "context_size" not in sizes else 1
    for data_rank, mine in enumerate(_inputs().chunk(num_data_ranks)):
        (model(mine, _uses_maybe(data_rank)) / num_data_ranks).backward()
    assert model.never.weight.grad is None and model.maybe.weight.grad is not None
    for weights, num_axes, gradients in gloo.run(_train, sizes, world_size=world_size):
        assert num_axes == 2 + ("replicate_size" in sizes)
        assert weights.keys() == state.keys()
        assert not [name for name in state if not torch.equal(weights[name], state[name])]
        assert_close(gradients, gradients_of(model))


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
