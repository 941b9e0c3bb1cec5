"""Tensors of all nodes as one DTensor, the way back on another number of nodes, and weights that differ by node."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_muon.comm.groups import axis_group
from lightning_muon.flexdemo.nodes import NodeLayout, check_equal
from lightning_muon.math.checksum import checksums
from tests.support.processes import ProcessPool

# Rows that do not divide, fewer rows than ranks, a stack.
SHAPES = [(13, 7), (1, 5), (3, 4, 2), (6,)]


def _mesh(shape: tuple[int, int]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _saved(shape: tuple[int, ...], num_nodes: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_nodes)
    return torch.randn((num_nodes, *shape), generator=generator)


def _parameter(shape: tuple[int, ...], mesh: DeviceMesh, dim: int = 0) -> Tensor:
    return distribute_tensor(torch.zeros(shape), mesh["shard"], [Shard(dim)], src_data_rank=None)


def _rows(whole: Tensor, mesh: DeviceMesh, dim: int = 0) -> Tensor:
    """The shard of this rank, as FSDP2 divides."""
    pieces = list(torch.chunk(whole, mesh.size(1), dim))
    rank = mesh.get_local_rank("shard")
    return pieces[rank] if rank < len(pieces) else whole.narrow(dim, 0, 0)


def _taken_apart(mesh_shape: tuple[int, int], num_saved: int, is_dtensor: bool) -> None:
    mesh = _mesh(mesh_shape)
    layout, (num_nodes, _), node = NodeLayout(mesh), mesh_shape, mesh.get_local_rank("replicate")
    for shape in SHAPES:
        whole = _saved(shape, num_saved)
        value = whole.clone()
        if is_dtensor:
            placements = [Shard(0), Shard(1)] if num_saved == num_nodes else [Shard(1), Replicate()]
            value = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        found = layout.of_this_node(value, _parameter(shape, mesh))
        if num_saved == num_nodes:
            assert torch.equal(found, _rows(whole[node], mesh))
        else:
            expected = whole.double().mean(0)
            torch.testing.assert_close(found.double(), _rows(expected, mesh), rtol=0, atol=1e-6)
        assert found.dtype == torch.float32
        found.fill_(5)
        assert torch.equal(value.full_tensor() if is_dtensor else value, whole), "memory is shared"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("mesh_shape", "is_dtensor"),
    [((2, 2), True), ((2, 2), False), ((3, 1), True), ((1, 3), False)],
    ids=str,
)
def test_a_node_gets_its_own_or_the_mean_of_all(
    gloo: ProcessPool, mesh_shape: tuple[int, int], is_dtensor: bool
) -> None:
    for num_saved in {mesh_shape[0], 1, 3}:
        gloo.run(_taken_apart, mesh_shape, num_saved, is_dtensor, world_size=mesh_shape[0] * mesh_shape[1])


def test_a_process_alone_takes_the_mean_of_several_nodes() -> None:
    parameter, whole = nn.Parameter(torch.zeros(4, 3)), _saved((4, 3), 3)
    found = NodeLayout(None).of_this_node(whole, parameter)
    torch.testing.assert_close(found, whole.mean(0), rtol=0, atol=1e-6)
    assert torch.equal(NodeLayout(None).of_this_node(whole[1:2], parameter), whole[1])


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
    blocks = torch.arange(3 * 8 * 2**16 + 5).to(torch.uint8).view(-1)
    assert not torch.equal(checksums([blocks]), checksums([torch.cat([blocks[8 * 2**16 :], blocks[: 8 * 2**16]])]))


NAMES = ("layer.weight", "layer.bias", "head.weight")


def _check(mesh_shape: tuple[int, int], changed: dict[int, str]) -> None:
    """Change the last element of the shards of some ranks: rank -> name."""
    mesh = _mesh(mesh_shape)
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
