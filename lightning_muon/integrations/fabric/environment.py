"""The part of the Fabric strategy that comes before any module: options, processes, mesh, precision."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.compat.lightning import LightningPackage, start_process_group
from lightning_muon.engine.mesh_sizes import Meshes
from lightning_muon.engine.model_setup import SUPPORTED
from lightning_muon.engine.options import Options
from lightning_muon.integrations.lightning.registry import STRATEGIES


class FabricEnvironment:
    """Starts the processes of a Fabric program and arranges them in a mesh.

    Args:
        options: What the user chose.
    """

    package: ClassVar[LightningPackage]
    # Of the class beside it.
    root_device: torch.device
    accelerator: Any
    num_nodes: int
    num_processes: int
    world_size: int
    global_rank: int

    def __init__(self, options: Options) -> None:
        self.options = options
        self._meshes: Meshes | None = None
        super().__init__(
            parallelize_fn=lambda module, _: module,
            save_distributed_checkpoint=options.save_distributed_checkpoint,
            process_group_backend=options.process_group_backend,
            timeout=options.timeout,
        )

    def __repr__(self) -> str:
        """Also what a Trainer, or the Fabric of the other package, quotes when it refuses the strategy."""
        names = " and ".join(map(repr, STRATEGIES))
        return f"<{type(self).__name__} for Fabric; the names {names} find the right class for each package>"

    @property
    def precision(self) -> Any:
        """Fabric's precision plugin."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        name = str(getattr(plugin, "precision", SUPPORTED[0]))
        if name not in SUPPORTED:
            raise ValueError(
                f"Fabric(precision={name!r}) is not supported by {type(self).__name__}: FSDP2 and Muon cannot honour "
                f"it (float16 needs loss scaling); use one of {', '.join(map(repr, SUPPORTED))}"
            )
        super(FabricEnvironment, type(self)).precision.fset(self, plugin)  # type: ignore[attr-defined]

    @property
    def device_mesh(self) -> DeviceMesh:
        """Axes ``("replicate", "shard")``, then ``"context"`` and ``"tensor"`` where they are larger than 1."""
        if self._meshes is None:
            raise RuntimeError("there is no device mesh before fabric.launch()")
        return self._meshes.user

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Replicas and shards have samples of their own; context and tensor ranks share them."""
        if self._meshes is None:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return {"num_replicas": self._meshes.num_data_ranks, "rank": self._meshes.data_rank}

    def setup_environment(self) -> None:
        """Start the process group and make the mesh. Collective over all ranks; every rank must call it."""
        layout = {"num_nodes": self.num_nodes, "num_processes": self.num_processes}
        # An error here is the same on all ranks, and comes before any communication.
        self.options.mesh_sizes.resolve(**layout)
        self.accelerator.setup_device(self.root_device)
        start_process_group(self)
        if self._meshes is None:  # fabric.launch may be called twice.
            self._meshes = self.options.mesh_sizes.make(self.root_device.type, **layout)

    def _mesh(self) -> DeviceMesh:
        """The ranks with batches of their own."""
        assert self._meshes is not None, "fabric.launch() comes first"
        mesh = self._meshes.nodes if self.options.has_nodes else self._meshes.data
        assert mesh is not None, "Options refuse meshes without nodes"
        return mesh
