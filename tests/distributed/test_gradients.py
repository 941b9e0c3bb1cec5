"""Gradients that some or all ranks lack, and partial sums."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_muon import ParallelMuon
from lightning_muon.params.layout import local_tensor
from tests.distributed.sharding.training import mesh_of
from tests.reference.muon import ReferenceMuon
from tests.support.processes import ProcessPool

SHAPES = {"first": (13, 7), "second": (7, 13), "bias": (5,), "third": (6, 6)}


def _mesh() -> DeviceMesh:
    return mesh_of((dist.get_world_size(),))


def _tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _step_with_missing(missing: dict[int, list[str]]) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """One step; ``missing`` says which gradients a rank does not have. Returns weights and what was left untouched."""
    mesh = _mesh()
    placed = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in _tensors(0).items()}
    parameters = {name: nn.Parameter(tensor) for name, tensor in placed.items()}
    optimizer = ParallelMuon(parameters.items(), lr=0.02, compute_dtype="float32", bucket_bytes=400)
    grads = {name: distribute_tensor(grad, mesh, [Shard(0)]) for name, grad in _tensors(1).items()}
    for name, parameter in parameters.items():
        parameter.grad = None if name in missing.get(dist.get_rank(), []) else grads[name]
    before = {name: parameter.detach().to_local().clone() for name, parameter in parameters.items()}  # type: ignore[attr-defined]
    optimizer.step()
    untouched = {
        name: torch.equal(before[name], local_tensor(parameter))
        and not any(local_tensor(value).any() for value in optimizer.state[parameter].values())
        for name, parameter in parameters.items()
    }
    return {name: parameter.detach().full_tensor() for name, parameter in parameters.items()}, untouched  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_that_one_rank_lacks_counts_as_zero_there(gloo: ProcessPool, world_size: int) -> None:
    results = gloo.run(_step_with_missing, {1: ["first"]}, world_size=world_size)
    reference = ReferenceMuon({name: t for name, t in _tensors(0).items() if name != "bias"}, lr=0.02)
    grads = _tensors(1)
    grads["first"].chunk(world_size)[1].zero_()
    reference.step({name: grad for name, grad in grads.items() if name != "bias"})
    for weights, _ in results:
        for name, expected in reference.matrices.items():
            torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-6)


def test_a_gradient_that_no_rank_has_leaves_all_untouched(gloo: ProcessPool) -> None:
    nobody = {rank: ["second", "bias"] for rank in range(3)}
    for _, untouched in gloo.run(_step_with_missing, nobody, world_size=3):
        assert untouched == {"first": False, "second": True, "bias": True, "third": False}


def _partial_sum(lacking_rank: int | None) -> bool:
    """A replicated weight whose gradient is still a sum over the ranks."""
    mesh = _mesh()
    weight = nn.Parameter(distribute_tensor(torch.ones(6, 6), mesh, [Replicate()]))
    optimizer = ParallelMuon([weight], lr=0.02, compute_dtype="float32", wire_dtype="float32")
    torch.manual_seed(0)
    full = torch.randn(6, 6)
    if dist.get_rank() != lacking_rank:
        share = full / dist.get_world_size()
        weight.grad = DTensor.from_local(share, mesh, [Partial()], run_check=False)
    optimizer.step()
    reference = ReferenceMuon({"weight": torch.ones(6, 6)}, lr=0.02)
    reference.step({"weight": full})
    torch.testing.assert_close(weight.detach().full_tensor(), reference.matrices["weight"], rtol=0, atol=1e-6)  # type: ignore[attr-defined]
    return True


def test_a_partial_sum_is_reduced_unless_a_rank_lacks_it(gloo: ProcessPool) -> None:
    assert all(gloo.run(_partial_sum, None, world_size=3))
    gloo.expect_error_on_all_ranks(_partial_sum, 1, match="partial sum", exception=TypeError, world_size=2)
