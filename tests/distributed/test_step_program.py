"""A net that each mode trains, for the tests of a step; how far it is from a step to its first message."""

import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon import FlexDeMo, ParallelMuon
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.sharding.base import ModeOptions, ShardingMode
from lightning_muon.sharding.modes import make_mode
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.LayerNorm(7)) for _ in range(8))
        self.unused = nn.Linear(3, 5)

    def forward(self, x: Tensor, num_layers: int = 8) -> Tensor:
        for layer in self.layers[:num_layers]:
            x = layer(x)
        return x


def start(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> tuple[ShardingMode, Net, PlannedOptimizer]:
    torch.manual_seed(3)
    net, is_flexdemo = Net(), name == "flexdemo"
    made = ModeOptions(decoupled_nodes=is_flexdemo, bucket_bytes=300)
    mode = make_mode("fsdp" if is_flexdemo else name, mesh_of(shape), made)
    mode.prepare(net)
    options = {"lr": 0.02, "compute_dtype": "float32", "bucket_bytes": 200, **options}
    optimizer = (FlexDeMo if is_flexdemo else ParallelMuon)(net, **options)
    mode.attach(net, [optimizer])
    return mode, net, optimizer


def _frames() -> int:
    mode, net, optimizer = start("fsdp", (dist.get_world_size(),), {})
    depths: list[int] = []

    def count(*arguments: Any, original: Any = dist.all_to_all_single, **options: Any) -> Any:
        frame, depth = sys._getframe(1), 0
        while frame.f_code is not ParallelMuon.step.__wrapped__.__wrapped__.__code__:
            frame, depth = frame.f_back, depth + 1
        depths.append(depth + 1)
        return original(*arguments, **options)

    for _ in range(2):
        net(torch.ones(2, 7), 8).sum().backward()
        mode.finish_gradients()
        with mock.patch.object(dist, "all_to_all_single", count):
            optimizer.step()
    return max(depths)


def test_five_frames_lie_between_step_and_the_first_all_to_all(gloo: ProcessPool) -> None:
    assert max(gloo.run(_frames, world_size=2)) <= 5
