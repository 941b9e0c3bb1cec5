"""Sequences that are divided over context ranks, gathered again."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.sharding.context_parallel import gather_sequence, split_sequence
from tests.support.processes import ProcessPool


def _gather(dim: int, dtype: torch.dtype) -> list[Tensor]:
    """The whole, and the gradient of this rank's part for a loss that weighs elements differently on each rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    whole = torch.arange(24 * mesh.size(), dtype=dtype).view(2, 3 * mesh.size(), 4).transpose(1, dim)
    part = split_sequence(whole, mesh, dim=dim).transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    gathered = gather_sequence(part, mesh, dim)
    (gathered * whole * (mesh.get_local_rank() + 1)).sum().backward()
    assert part.grad is not None
    return [gathered.detach(), part.grad, whole]


@pytest.mark.parametrize(
    ("world_size", "dtype", "dim"), [(1, torch.float32, 1), (3, torch.float32, 1), (3, torch.bfloat16, 2)]
)
def test_gathering_gives_the_whole_and_its_backward_the_sum(
    gloo: ProcessPool, world_size: int, dim: int, dtype: torch.dtype
) -> None:
    for rank, (gathered, grad, whole) in enumerate(gloo.run(_gather, dim, dtype, world_size=world_size)):
        assert torch.equal(gathered, whole)
        # Small whole numbers: exact in float32, and one rounding of each product and of the sum in bfloat16.
        expected = (sum(range(1, world_size + 1)) * whole).chunk(world_size, dim)[rank]
        torch.testing.assert_close(grad, expected, rtol=0 if dtype == torch.float32 else 2**-6, atol=0)
