"""An optimizer with random weights of given shapes, to measure steps without a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_muon.compat.torch import local_shape_and_offset
from lightning_muon.monitor.ranks import this_device
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape


def make_optimizer(model: ModelShapes, *, num_replicas: int = 1, **options: Any) -> ParallelMuon:
    """ParallelMuon on weights and gradients of these shapes, sharded as FSDP2 does.

    Collective over the default process group; every rank must call it.

    Args:
        model: Shapes; frozen parameters are left out.
        num_replicas: Size of the replicate axis; must divide the number of ranks.
        **options: Of :class:`~lightning_muon.ParallelMuon`.
    """
    num_ranks = dist.get_world_size()
    if num_ranks % num_replicas:
        raise ValueError(f"{num_ranks} ranks cannot be divided into {num_replicas} replicas; choose a divisor")
    device = this_device()
    mesh = init_device_mesh(
        device.type, (num_replicas, num_ranks // num_replicas), mesh_dim_names=("replicate", "shard")
    )
    # Replicas hold equal weights.
    torch.manual_seed(mesh.get_local_rank("shard"))
    trained = [parameter for parameter in model.parameters if not parameter.frozen]
    groups: list[dict[str, Any]] = []
    for algorithm, chosen in (
        ("muon", [parameter for parameter in trained if parameter.kind != "elementwise"]),
        ("adamw", [parameter for parameter in trained if parameter.kind == "elementwise"]),
    ):
        named = [(parameter.name, _weight(parameter, mesh)) for parameter in chosen]
        if named:
            groups.append({"params": named, "algorithm": algorithm})
    fused = {parameter.name: parameter.splits for parameter in trained if parameter.splits}
    return ParallelMuon(groups, fused=fused, **options)


def _weight(parameter: ParameterShape, mesh: DeviceMesh) -> nn.Parameter:
    """With a gradient."""
    placements: tuple[Placement, ...] = (Replicate(), Shard(parameter.shard_dim) if parameter.shape else Replicate())
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shape = torch.Size(parameter.shape)
    local_shape, _ = local_shape_and_offset(shape, tuple(mesh.shape), coordinate, placements)
    stride = torch.empty(shape, device="meta").stride()

    def draw() -> Tensor:
        local = torch.randn(local_shape, device=mesh.device_type)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    weight = nn.Parameter(draw())
    weight.grad = draw()
    return weight
