"""Meshes, and the odd model of the matrix in a loop of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_muon import FlexDeMo, ParallelMuon
from lightning_muon.sharding.base import ModeOptions, ShardingMode
from lightning_muon.sharding.modes import make_mode
from tests.matrix.row import Net, Row
from tests.support.tensors import weights_of

_ROW = Row(ranks=2)


def model(dtype: torch.dtype = torch.float32) -> Net:
    return _ROW.make_model(seed=3).to(dtype)


def optimizer_for(net: nn.Module, **options: Any) -> ParallelMuon:
    return ParallelMuon(net, lr=0.02, weight_decay=0.1, compute_dtype="float32", wire_dtype="float32", **options)


def loss(net: nn.Module, step: int, rank: int) -> Tensor:
    """Of one of two ranks."""
    return _ROW.loss(net, _ROW.batch(step, 0, rank))


@dataclass
class Training:
    mode: ShardingMode
    net: Net
    optimizer: ParallelMuon | FlexDeMo

    @classmethod
    def start(cls, name: str, mesh: DeviceMesh, *, net: Any = None, dedupe: Any = "auto", **options: Any) -> Training:
        """With a mode of this name, or with ``"flexdemo"`` over the first axis of the mesh."""
        net, is_flexdemo = net or model(), name == "flexdemo"
        mode = make_mode("fsdp" if is_flexdemo else name, mesh, ModeOptions(decoupled_nodes=is_flexdemo, **options))
        mode.prepare(net)
        optimizer = FlexDeMo(net, lr=0.02, base="muon") if is_flexdemo else optimizer_for(net, dedupe=dedupe)
        mode.attach(net, [optimizer])
        return cls(mode, net, optimizer)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss(self.net, step, dist.get_rank() % 2).backward()
        self.mode.finish_gradients()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        self.mode.finish_parameters()
        return weights_of(self.net)


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
