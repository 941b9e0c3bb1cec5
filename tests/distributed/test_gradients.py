"""Gradients that some ranks lack, and partial sums."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_muon import ParallelMuon
from tests.distributed.sharding.training import mesh_of
from tests.matrix.row import EXACT
from tests.reference.muon import ReferenceMuon
from tests.support.processes import ProcessPool
from tests.support.tensors import random_tensors, whole

SHAPES = {"weight": (13, 7), "other": (7, 13), "bias": (5,)}


def _one_rank_lacks(placement: Any) -> dict[str, Tensor]:
    """Weights after two steps, in the first of which rank 1 has no gradient of a matrix and of the bias."""
    mesh = mesh_of((dist.get_world_size(),))

    def place(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None) if placement else tensor.clone()

    parameters = {name: nn.Parameter(place(tensor)) for name, tensor in random_tensors(SHAPES, 0).items()}
    optimizer = ParallelMuon(parameters.items(), lr=0.02, mesh=mesh, bucket_bytes=400, **EXACT)
    for step in range(2):
        for name, grad in random_tensors(SHAPES, 1 + step).items():
            lacks = step == 0 and dist.get_rank() == 1 and name != "other"
            parameters[name].grad = None if lacks else place(grad)
        optimizer.step()
    return {name: whole(each) for name, each in parameters.items()}


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), None], ids=str)
def test_a_gradient_that_one_rank_lacks_counts_as_zero_there(gloo: ProcessPool, placement: Any) -> None:
    """Of replicas that is the mean over all of them."""
    results = gloo.run(_one_rank_lacks, placement, world_size=3)
    start, *gradients = (random_tensors(SHAPES, seed) for seed in range(3))
    reference = ReferenceMuon({name: start[name] for name in ("weight", "other")}, lr=0.02)
    if placement == Shard(0):
        gradients[0]["weight"].chunk(3)[1].zero_()
    else:
        gradients[0]["weight"].mul_(2 / 3)
    for grads in gradients:
        reference.step({name: grads[name] for name in reference.matrices})
    for weights in results:
        for name, matrix in reference.matrices.items():
            torch.testing.assert_close(weights[name], matrix, rtol=0, atol=1e-6)
        assert torch.equal(weights["bias"], results[0]["bias"])


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
