"""Device meshes from the options: how many replicas of how many shards, and which ranks share a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from lightning_muon.comm.agreement import require_equal, together
from lightning_muon.compat.torch import inherit_timeout
from lightning_muon.config import check_whole

SizeOrAuto = int | Literal["auto"]

# Where users of each framework set it.
_NUM_PROCESSES = "the number of processes (devices and num_nodes of a Trainer or Fabric, --num-processes of a launcher)"


class UserMesh(DeviceMesh):
    """``LightningModule.device_mesh``: its parts also by the names of Lightning's ``ModelParallelStrategy``."""

    lightning_parts: Mapping[str, DeviceMesh]

    @override
    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        # torch finds flattened axes only in the mesh that this one is cut from, and plans to drop that.
        part = self.lightning_parts.get(mesh_dim_names) if isinstance(mesh_dim_names, str) else None
        return super().__getitem__(mesh_dim_names) if part is None else part

    @override
    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        part = self.lightning_parts.get(mesh_dim) if isinstance(mesh_dim, str) else None
        return super().get_group(mesh_dim) if part is None else part.get_group()


@dataclass(frozen=True, kw_only=True, eq=False)
class Meshes:
    """The meshes of a run, seen from one rank."""

    # `LightningModule.device_mesh`: axes `("replicate", "shard")`, then `"context"` and `"tensor"` where larger than 1.
    # The names of Lightning's ModelParallelStrategy give a submesh: `"data_parallel"` is `data`, `"tensor_parallel"`
    # has the tensor ranks, which may be one.
    user: DeviceMesh
    # The ranks over which FSDP shards and replicates: (replicate, shard), or 1-D (shard) for one replica that is not a
    # node of FlexDeMo. Its shard axis covers shard x context ranks, because context ranks hold gradients of different
    # parts of a batch.
    data: DeviceMesh
    # All ranks by (pipeline, replicate, shard), `None` without a pipeline; `data` has those of one stage.
    stages: DeviceMesh | None
    tensor: DeviceMesh | None  # The ranks that share each layer that the user parallelizes, `None` for one rank.
    data_rank: int  # Which samples this rank sees; equal on the context and tensor ranks that share them.
    num_data_ranks: int  # Number of different `data_rank` values: replicas x shards.


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """The sizes that the user asked for. Ranks are numbered tensor fastest, then context, shard, replicate, pipeline.

    Args:
        replicate_size: Number of replicas of the model. ``"auto"``: one per node (one in all if context and tensor
            ranks do not fit into a node), or what ``shard_size`` leaves.
        shard_size: Number of data ranks over which each replica is sharded. ``"auto"``: those of a node, or what
            ``replicate_size`` leaves.
        context_size: Number of ranks that share the sequences of a data rank; weights are sharded over them too.
        tensor_size: Number of ranks that share each layer which ``configure_model`` parallelizes.
        pipeline_size: Number of ranks over which the layers are divided into stages.
    """

    replicate_size: SizeOrAuto = "auto"
    shard_size: SizeOrAuto = "auto"
    context_size: int = 1
    tensor_size: int = 1
    pipeline_size: int = 1

    def __post_init__(self) -> None:
        for key, value in self.asked_sizes.items():
            if key in ("context_size", "tensor_size", "pipeline_size"):
                check_whole(key, value, at_least=1)
            elif value != "auto":
                check_whole(key, value, at_least=1, other="'auto' or ")
        if self.pipeline_size > 1 and (self.context_size > 1 or self.tensor_size > 1):
            raise ValueError(
                f"pipeline_size={self.pipeline_size} goes with replicate_size and shard_size only; remove "
                "context_size and tensor_size"
            )

    def resolve(self, *, num_nodes: int, num_processes: int) -> tuple[int, int]:
        """Return (replicas, shards) for ``num_nodes`` nodes with ``num_processes`` devices each, or raise."""
        world_size = num_nodes * num_processes
        inner = self.context_size * self.tensor_size * self.pipeline_size
        replicas, shards = self.replicate_size, self.shard_size
        if replicas == shards == "auto":
            # Replicas between nodes only where whole shard groups lie inside of one; stages go to different nodes.
            nodes_of_stage, rest = divmod(num_nodes, self.pipeline_size)
            if self.pipeline_size == 1:
                replicas = num_nodes if num_processes % inner == 0 else 1
            else:
                replicas = 1 if rest else nodes_of_stage
        if replicas == "auto":
            replicas = max(1, world_size // (int(shards) * inner))
        if shards == "auto":
            shards = max(1, world_size // (int(replicas) * inner))
        sizes = int(replicas), int(shards)
        if math.prod(sizes) * inner != world_size:
            others = {"context": self.context_size, "tensor": self.tensor_size, "pipeline": self.pipeline_size}
            factors = [f"{size} {axis} ranks" for axis, size in others.items() if size > 1]
            product = " x ".join([f"{sizes[0]} replicas", f"{sizes[1]} shards", *factors])
            asked = [f"{key}={value}" for key, value in self.asked_sizes.items() if value != getattr(MeshSizes, key)]
            raise ValueError(
                f"{product} = {math.prod(sizes) * inner} ranks, but there are {world_size} ({num_nodes} nodes x "
                f"{num_processes} devices); change {', '.join(asked)}, or {_NUM_PROCESSES}"
            )
        return sizes

    def make(self, device_type: str, *, num_nodes: int, num_processes: int, by_nodes: bool = False) -> Meshes:
        """Return the meshes of this rank; ``by_nodes``: replicas are nodes that average gradients by themselves.

        Collective over all ranks.
        """
        resolve = partial(self.resolve, num_nodes=num_nodes, num_processes=num_processes)
        lines = [(key, str(value)) for key, value in (*self.asked_sizes.items(), ("by_nodes", by_nodes))]
        what = "the size of the mesh"
        # Process groups of different sizes would wait for each other.
        replicas, shards = together(resolve, then=lambda _, ranks: require_equal(lines, ranks, what))
        axes = {"pipeline": self.pipeline_size} if self.pipeline_size > 1 else {}
        axes |= {"replicate": replicas, "shard": shards}
        axes |= {"context": self.context_size} if self.context_size > 1 else {}
        outer = _named_mesh(device_type, axes | {"tensor": self.tensor_size})
        user, tensor = outer[tuple(axes)] if self.tensor_size == 1 else outer, outer["tensor"]
        if self.context_size > 1:
            # FSDP2 takes one shard axis. Its mesh and that of tensor parallelism may be cut from meshes of different
            # axes, as long as these number all ranks alike.
            flat = {"replicate": replicas, "shard": shards * self.context_size, "tensor": self.tensor_size}
            outer = _named_mesh(device_type, flat)
        nodes = outer["replicate", "shard"]
        data = nodes if replicas > 1 else outer["shard"]
        user.__class__ = UserMesh
        vars(user)["lightning_parts"] = {"data_parallel": data, "tensor_parallel": tensor}
        return Meshes(
            user=user,
            data=nodes if by_nodes else data,
            stages=user if self.pipeline_size > 1 else None,
            tensor=tensor if self.tensor_size > 1 else None,
            data_rank=dist.get_rank() // (self.context_size * self.tensor_size) % (replicas * shards),
            num_data_ranks=replicas * shards,
        )

    @property
    def asked_sizes(self) -> dict[str, SizeOrAuto]:
        """Name of each size -> what was asked for."""
        return {each.name: getattr(self, each.name) for each in fields(MeshSizes)}


def _named_mesh(device_type: str, axes: dict[str, int]) -> DeviceMesh:
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():
        inherit_timeout(group)
    return mesh
