"""One process as rank 0 of many: weights without memory, and neither arithmetic nor communication.

What remains is what the host of a rank has to do; all ranks have the same share of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_muon import ParallelMuon
from lightning_muon.compat.torch import local_shape_and_offset
from lightning_muon.params.shapes import ParameterShape
from tests.support.fake_cuda import all_gather_object

Found = Sequence[tuple[ParameterShape, nn.Parameter]]


@contextlib.contextmanager
def rank_of(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of ``num_ranks``; all others are taken to answer the same."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        with (
            mock.patch.object(dist, "all_gather_object", all_gather_object),
            mock.patch("lightning_muon.comm.collectives.world_timeout", timedelta),
        ):
            yield
    finally:
        dist.destroy_process_group()


def weights(shapes: Sequence[ParameterShape], num_ranks: int) -> Found:
    """Trainable bfloat16 parameters on rank 0 of a 1-D mesh, without memory, each with a gradient."""
    found: list[tuple[ParameterShape, nn.Parameter]] = []
    mesh = init_device_mesh("cpu", (num_ranks,))
    for shape in (shape for shape in shapes if not shape.frozen):
        parameter = nn.Parameter(sharded(shape.shape, mesh, [Shard(shape.shard_dim)]))
        parameter.grad = sharded(shape.shape, mesh, [Shard(shape.shard_dim)])
        found.append((shape, parameter))
    return found


def sharded(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "meta",
) -> DTensor:
    """The part of the first rank; on "meta" without memory."""
    local_shape, _ = local_shape_and_offset(shape, tuple(mesh.shape), [0] * mesh.ndim, placements)
    local, stride = torch.empty(local_shape, dtype=dtype, device=device), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def optimizer_of(found: Found, **options: Any) -> ParallelMuon:
    """With the groups and fused weights that the shapes say; there are no values to look at for a NaN."""
    muon = [(shape.name, tensor) for shape, tensor in found if shape.kind != "elementwise"]
    adamw = [(shape.name, tensor) for shape, tensor in found if shape.kind == "elementwise"]
    groups = [{"params": muon, "algorithm": "muon"}, {"params": adamw, "algorithm": "adamw"}]
    fused = {shape.name: shape.splits for shape, _ in found if shape.splits}
    groups = [group for group in groups if group["params"]]
    return ParallelMuon(groups, fused=fused, compute_dtype="bfloat16", error_if_nonfinite=False, **options)
