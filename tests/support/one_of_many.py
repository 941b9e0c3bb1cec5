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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_muon import ParallelMuon
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.compat.torch import local_shape_and_offset
from lightning_muon.params.shapes import ParameterShape

Found = Sequence[tuple[ParameterShape, nn.Parameter]]


@contextlib.contextmanager
def rank_of(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of ``num_ranks``; all others are taken to answer the same, and nothing is computed."""

    def reduce(values: Tensor, group: AxisGroup) -> mock.Mock:
        values.mul_(group.size)
        return mock.Mock()

    def from_this_rank(found: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
        del group
        found[:] = [value] * len(found)

    def no_matrix(matrix: Tensor, **_: object) -> Tensor:
        return matrix

    def nothing(*_: object, **__: object) -> None:
        return None

    def first(tensors: Sequence[Tensor], *_: object, **__: object) -> list[Tensor]:
        return list(tensors)

    package, norm = "lightning_muon", torch.zeros((), device="meta")
    replaced: dict[str, Any] = {
        "torch.distributed.all_gather_object": from_this_rank,
        f"{package}.comm.groups.host_group": lambda group: group,
        f"{package}.comm.groups.world_timeout": timedelta,
        f"{package}.optim.gradients.start_all_reduce_sum": reduce,
        # There is nothing to read from these tensors.
        f"{package}.optim.gradients.start_reading": lambda tensors: lambda: [[0] * each.numel() for each in tensors],
        f"{package}.optim.planned_optimizer.adamw_step_": nothing,
        f"{package}.optim.transfer.start_all_to_all": lambda *_, **__: [],
        f"{package}.optim.transfer.start_messages": lambda *_: [],
        f"{package}.math.newton_schulz.orthogonalize": no_matrix,
        f"{package}.compat.foreach.norm": lambda tensors, *_, **__: [norm] * len(tensors),
        f"{package}.compat.foreach.lerp": first,
        **{f"{package}.compat.foreach.{name}": nothing for name in ("add_", "copy_", "lerp_", "mul_")},
    }
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        with contextlib.ExitStack() as stack:
            for name, replacement in replaced.items():
                stack.enter_context(mock.patch(name, replacement))
            yield
    finally:
        dist.destroy_process_group()


def weights(shapes: Sequence[ParameterShape], num_ranks: int) -> Found:
    """Trainable bfloat16 parameters on rank 0 of a 1-D mesh, without memory, each with a gradient."""
    found: list[tuple[ParameterShape, nn.Parameter]] = []
    mesh = init_device_mesh("cpu", (num_ranks,))
    for shape in (shape for shape in shapes if not shape.frozen):
        parameter = nn.Parameter(sharded(shape, mesh, [Shard(shape.shard_dim)]))
        parameter.grad = sharded(shape, mesh, [Shard(shape.shard_dim)])
        found.append((shape, parameter))
    return found


def sharded(shape: ParameterShape, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The part of the first rank, without memory."""
    local_shape, _ = local_shape_and_offset(shape.shape, tuple(mesh.shape), [0] * mesh.ndim, placements)
    whole, local = (torch.empty(each, dtype=torch.bfloat16, device="meta") for each in (shape.shape, local_shape))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def optimizer_of(found: Found) -> ParallelMuon:
    """With the groups and fused weights that the shapes say."""
    muon = [(shape.name, tensor) for shape, tensor in found if shape.kind != "elementwise"]
    adamw = [(shape.name, tensor) for shape, tensor in found if shape.kind == "elementwise"]
    groups = [{"params": muon, "algorithm": "muon"}, {"params": adamw, "algorithm": "adamw"}]
    fused = {shape.name: shape.splits for shape, _ in found if shape.splits}
    return ParallelMuon([group for group in groups if group["params"]], fused=fused, compute_dtype="bfloat16")
