"""A model sharded by FSDP2 inside of each node, whose ranks see different data."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_muon import FlexDeMo
from tests.distributed.flexdemo.setup import Ranks
from tests.matrix.row import Row


class ShardedNet(Ranks):
    """The calling rank's part of the odd model of the matrix, and its optimizer."""

    def __init__(self, mesh_shape: tuple[int, int], options: Mapping[str, Any]) -> None:
        self.mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
        self.node, self.shard_rank = self.mesh.get_local_rank("replicate"), self.mesh.get_local_rank("shard")
        self.row = Row(ranks=self.mesh.size(), parts=("conv", "frozen", "unused", "tied"))
        self.model = self.row.make_model()
        for unit in (*self.model.blocks, self.model):
            fully_shard(unit, mesh=self.mesh["shard"])
        self.optimizer = FlexDeMo(self.model, **({"lr": 0.01, "base": "sgd", "mesh": self.mesh} | dict(options)))

    def set_gradients(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.row.loss(self.model, self.row.batch(step, 0, self.mesh.get_rank())).backward()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        self.model.reshard()
        return dict(self.model.named_parameters())
