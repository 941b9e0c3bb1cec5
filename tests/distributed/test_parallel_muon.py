"""ParallelMuon: groups with options of their own, arithmetic and wire, several meshes, gradients as partial sums."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_muon import ParallelMuon
from tests.distributed.sharding.training import mesh_of
from tests.matrix.row import EXACT
from tests.reference.muon import ReferenceMuon
from tests.support import family
from tests.support.processes import ProcessPool
from tests.support.tensors import set_gradients, whole

Options = dict[str, Any]


def _train(dtype: str, groups: list[Options]) -> list[Tensor]:
    """Equal weights and gradients in groups with other options; small, so that Newton-Schulz runs on batches."""
    mesh, whole_ones = mesh_of((dist.get_world_size(),)), torch.randn(4, 33, 40, generator=torch.Generator())
    first, *grads = (distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for each in whole_ones)
    parameters = [nn.Parameter(first.clone()) for _ in groups]
    named = [{"params": [each], **options} for each, options in zip(parameters, groups, strict=True)]
    optimizer = ParallelMuon(named, lr=0.02, algorithm="muon", compute_dtype=dtype)
    for grad in grads:
        for parameter in parameters:
            parameter.grad = grad.clone()
        optimizer.step()
    return [whole(parameter) for parameter in parameters]


def test_groups_with_other_options_share_no_batch(gloo: ProcessPool) -> None:
    eq, plus = {"orthogonalize": family.muon_eq}, {"orthogonalize": family.muon_plus}
    groups: list[Options] = [{}, eq, plus, eq, {}]
    together = gloo.run(_train, "float32", groups, world_size=2)
    for options, *found in zip(groups, *together, strict=True):
        (expected,) = gloo.run(_train, "float32", [options], world_size=1)[0]
        assert all(torch.equal(each, expected) for each in found)
    assert len({float(each.sum()) for each in together[0]}) == 3


def test_bfloat16_compute_loses_nothing_on_a_bfloat16_wire(gloo: ProcessPool) -> None:
    # Newton-Schulz rounds its input to bfloat16 and gives bfloat16 back, so the wire rounds nothing more: exact.
    (expected,) = gloo.run(_train, "bfloat16", [{}], world_size=1)[0]
    assert all(torch.equal(found, expected) for (found,) in gloo.run(_train, "bfloat16", [{}], world_size=4))


def _mixed_meshes(**options: bool) -> list[Tensor]:
    """Parameters on a 1-D mesh, on a 2-D mesh and local ones, in one optimizer, which loads the state of one process.

    That state, of whole tensors in another dtype, is loaded in place of what another step has left.
    """
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    alone = [nn.Parameter(torch.randn(shape)) for shape in ((9, 5), (5, 9), (6, 6), (8,))]
    layouts: list[Any] = [(line, [Shard(0)]), (grid, [Shard(1), Shard(0)]), None, (line, [Shard(0)])]

    def place(tensor: Tensor, layout: Any) -> Tensor:
        return tensor.clone() if layout is None else distribute_tensor(tensor, *layout)

    parameters = [nn.Parameter(place(one.detach(), layout)) for one, layout in zip(alone, layouts, strict=True)]
    optimizer = ParallelMuon(parameters, lr=0.1, compute_dtype="float32", **options)
    reference = ParallelMuon(alone, lr=0.1, compute_dtype="float32", **options)
    for step in range(3):
        if step == 1:
            saved = copy.deepcopy(reference.state_dict())
            states = enumerate(saved["state"].values())
            saved["state"] = {n: {k: v.double() if v.ndim else v for k, v in each.items()} for n, each in states}
            for state in optimizer.state.values():
                for value in state.values():
                    value.zero_()
            optimizer.load_state_dict(saved)
            loaded = [value for state in optimizer.state.values() for value in state.values()]
            assert all(value.dtype == torch.float32 for value in loaded)
        set_gradients(alone, step)
        for parameter, one, layout in zip(parameters, alone, layouts, strict=True):
            parameter.grad = place(one.grad, layout)  # type: ignore[arg-type]
        optimizer.step()
        reference.step()
    return [(whole(mine) - one.detach()).abs().max() for mine, one in zip(parameters, alone, strict=True)]


@pytest.mark.parametrize("options", [{}, {"normuon": True}], ids=str)
def test_parameters_on_several_meshes_share_one_optimizer(gloo: ProcessPool, options: dict[str, bool]) -> None:
    for differences in gloo.run(_mixed_meshes, **options):
        assert max(map(float, differences)) <= 1e-6


def _partial_sum(lacking_rank: int | None) -> Tensor:
    """A replicated weight whose gradient is still a sum over the ranks."""
    mesh = mesh_of((dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.ones(6, 6), mesh, [Replicate()]))
    optimizer = ParallelMuon([weight], lr=0.02, **EXACT)  # type: ignore[arg-type]
    if dist.get_rank() != lacking_rank:
        share = torch.arange(36.0).view(6, 6) / dist.get_world_size()
        weight.grad = DTensor.from_local(share, mesh, [Partial()], run_check=False)
    optimizer.step()
    return whole(weight)


def test_a_partial_sum_is_reduced_unless_a_rank_lacks_it(gloo: ProcessPool) -> None:
    reference = ReferenceMuon({"weight": torch.ones(6, 6)}, lr=0.02)
    reference.step({"weight": torch.arange(36.0).view(6, 6)})
    for weight in gloo.run(_partial_sum, None, world_size=3):
        torch.testing.assert_close(weight, reference.matrices["weight"], rtol=0, atol=1e-5)
    gloo.expect_error_on_all_ranks(_partial_sum, 1, match="partial sum", exception=TypeError, world_size=2)
