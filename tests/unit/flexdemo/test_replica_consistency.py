"""Weights that differ between nodes are found and named, on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_muon.comm.groups import axis_group
from lightning_muon.flexdemo.node_state import check_equal, checksums
from tests.support.processes import ProcessPool


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_any_changed_bit_changes_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 5).to(dtype)
    for index in range(35):
        other = weight.clone()
        other.view(-1).view(torch.uint8)[index * dtype.itemsize] ^= 1
        assert not torch.equal(checksums([other]), checksums([weight]))
    assert torch.equal(checksums([weight.clone()]), checksums([weight]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_that_have_changed_places_and_signs_are_noticed(dtype: torch.dtype) -> None:
    weight = torch.arange(1.0, 13.0).view(4, 3).to(dtype)
    swapped = weight[[1, 0, 2, 3]]
    flipped = weight * torch.tensor([-1.0, 1.0, 1.0]).to(dtype)
    neighbours = weight.view(-1)[[0, 1, 3, 2, *range(4, 12)]].view(4, 3)
    sums = {int(checksums([w])[0]) for w in (weight, swapped, flipped, neighbours)}
    assert len(sums) == 4
    assert not torch.equal(checksums([torch.zeros(1)]), checksums([-torch.zeros(1)]))


NAMES = ("layer.weight", "layer.bias", "head.weight")


def _check(mesh_shape: tuple[int, int], changed: dict[int, str]) -> None:
    """Change the last element of the shards of some ranks: rank -> name."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    weights: dict[str, Tensor] = {
        name: distribute_tensor(torch.randn(shape), mesh["shard"], [Shard(0)], src_data_rank=None)
        for name, shape in zip(NAMES, [(6, 3), (4,), (5, 5)], strict=True)
    }
    for rank, name in changed.items():
        if torch.distributed.get_rank() == rank:
            local = weights[name].to_local()  # type: ignore[attr-defined]
            local.view(-1)[-1] += 1e-3
    check_equal(list(weights.items()), axis_group(mesh, (0, 1)))


@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 1), (4, 1), (1, 2)], ids=str)
def test_equal_weights_are_no_error(gloo: ProcessPool, mesh_shape: tuple[int, int]) -> None:
    gloo.run(_check, mesh_shape, {}, world_size=mesh_shape[0] * mesh_shape[1])


@pytest.mark.parametrize(
    ("mesh_shape", "changed", "match"),
    [
        ((2, 2), {3: "layer.bias"}, r"1 parameters .* node 0: layer.bias \(node 1\)\."),
        ((3, 1), {1: "head.weight"}, r"head.weight \(node 1\)\..*some of them only"),
        ((4, 1), {3: "head.weight", 1: "head.weight"}, r"head.weight \(node 1, 3\)\."),
        ((3, 1), {2: "layer.weight", 1: "head.weight"}, r"2 parameters .*weight \(node 2\), head.weight \(node 1\)"),
        # The first node is what the others are compared with, also where it is the odd one out.
        ((3, 1), {0: "layer.bias"}, r"layer.bias \(node 1, 2\)"),
    ],
)
def test_all_ranks_hear_which_parameter_differs_on_which_node(
    gloo: ProcessPool, mesh_shape: tuple[int, int], changed: dict[int, str], match: str
) -> None:
    size = mesh_shape[0] * mesh_shape[1]
    gloo.expect_error_on_all_ranks(_check, mesh_shape, changed, match=match, exception=RuntimeError, world_size=size)
