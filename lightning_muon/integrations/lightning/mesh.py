"""How many replicas of how many shards: from what the user asked for to a device mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Size = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """The sizes that the user asked for.

    Args:
        replicate_size: Number of replicas of the model. ``"auto"``: one per node, or what ``shard_size`` leaves.
        shard_size: Number of ranks over which each replica is sharded. ``"auto"``: the devices of a node, or what
            ``replicate_size`` leaves.
        data_parallel_size: As in Lightning's ``ModelParallelStrategy``: shard over that many ranks, which must be all
            of them, with one replica. The mesh then has Lightning's axes ``("data_parallel", "tensor_parallel")``, so
            that a ``configure_model`` written for that strategy finds them.
        tensor_parallel_size: Must be 1 (or ``"auto"``, which is 1 here).
    """

    replicate_size: Size = "auto"
    shard_size: Size = "auto"
    data_parallel_size: Size = "auto"
    tensor_parallel_size: Size = "auto"

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{key} must be 'auto' or an integer of at least 1, got {value!r}")
        if self.tensor_parallel_size not in ("auto", 1):
            raise ValueError(
                f"tensor_parallel_size must be 1, got {self.tensor_parallel_size}: the strategy shards for data "
                "parallelism only; use replicate_size and shard_size"
            )
        if self.data_parallel_size == "auto":
            return
        if self.replicate_size not in ("auto", 1) or self.shard_size not in ("auto", self.data_parallel_size):
            raise ValueError(
                f"data_parallel_size={self.data_parallel_size} shards one replica over that many ranks, which "
                f"contradicts replicate_size={self.replicate_size!r} and shard_size={self.shard_size!r}; give only "
                "those two"
            )

    def resolve(self, *, num_nodes: int, num_processes: int) -> tuple[int, int]:
        """Return (replicas, shards) for ``num_nodes`` nodes with ``num_processes`` devices each.

        Raises:
            ValueError: If they do not multiply to the number of ranks.
        """
        world_size = num_nodes * num_processes
        replicas, shards = self.replicate_size, self.shard_size
        if self.data_parallel_size != "auto":
            replicas, shards = 1, self.data_parallel_size
        elif replicas == "auto" and shards == "auto":
            replicas, shards = num_nodes, num_processes
        elif replicas == "auto":
            replicas = _other_factor(world_size, "shard_size", shards)
        elif shards == "auto":
            shards = _other_factor(world_size, "replicate_size", replicas)
        if int(replicas) * int(shards) != world_size:
            asked = ", ".join(f"{key}={value}" for key, value in vars(self).items() if value != "auto")
            raise ValueError(
                f"{replicas} replicas x {shards} shards = {int(replicas) * int(shards)} ranks, but there are "
                f"{world_size} ({num_nodes} nodes x {num_processes} devices); change {asked}, or Trainer(devices=..., "
                "num_nodes=...)"
            )
        return int(replicas), int(shards)

    def make(self, device_type: str, *, num_nodes: int, num_processes: int) -> tuple[DeviceMesh, DeviceMesh]:
        """Return the mesh that users see, and the one to shard over: (replicate, shard), or (shard) for one replica.

        Collective over all ranks; every rank must call it.
        """
        replicas, shards = self.resolve(num_nodes=num_nodes, num_processes=num_processes)
        if self.data_parallel_size != "auto":
            mesh = init_device_mesh(device_type, (shards, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
            return mesh, mesh["data_parallel"]
        mesh = init_device_mesh(device_type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
        return mesh, mesh if replicas > 1 else mesh["shard"]


def _other_factor(world_size: int, key: str, size: Size) -> int:
    if world_size % int(size):
        raise ValueError(
            f"{key}={size} does not divide the number of ranks, {world_size}; change it, or Trainer(devices=..., "
            "num_nodes=...)"
        )
    return world_size // int(size)
