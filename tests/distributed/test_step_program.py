"""What a step runs is the program that was checked, op by op, in every mode; and how far it is to its first message."""

import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_muon import DiLoCo, FlexDeMo, ParallelMuon
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.sharding.base import ModeOptions, ShardingMode
from lightning_muon.sharding.modes import make_mode
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool
from tests.support.recorded_ops import recorded_ops


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


def _train(name: str, shape: tuple[int, ...], options: dict[str, Any], clips: bool) -> list[list[str]]:
    """What each step has run; the third one uses half of the layers."""
    mode, net, optimizer = start(name, shape, options)
    ran: list[list[str]] = []
    with recorded_ops() as recorded:
        for step in range(4):
            optimizer.zero_grad()
            inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            F.mse_loss(net(inputs, 4 if step == 2 else 8), inputs.roll(1, 1)).backward()
            mode.finish_gradients()
            if clips:
                mode.clip_grad_norm_(optimizer, 1e-3)
            optimizer.step()
            mode.end_step()
            ran.append(recorded.check())
    mode.finish_parameters()
    return ran


_SERIAL, _CLIPPED, _PLAIN = _ALL = [
    ({"overlap": overlap}, clips) for overlap, clips in (("off", False), ("step", True), ("step", False))
]
_MUON = [
    (name, shape, *each)
    for name, shape, chosen in (
        ("none", (1,), [_SERIAL, _CLIPPED]),
        ("fsdp", (2,), _ALL),
        ("fsdp", (2, 2), [_CLIPPED]),
        ("zero2", (2,), _ALL),
        ("zero2", (2, 2), [_CLIPPED, _PLAIN]),
        ("ddp", (2,), [_SERIAL, _CLIPPED]),
    )
    for each in chosen
]
_NORMUON = {"normuon": True}
_MUON += [
    ("fsdp", (2, 2), _NORMUON, True),
    *((name, (2,), _NORMUON, True) for name in ("fsdp", "zero2", "ddp")),
]


@pytest.mark.parametrize(("name", "shape", "options", "clips"), _MUON)
def test_every_mode_runs_the_program(
    gloo: ProcessPool, name: str, shape: tuple[int, ...], options: dict[str, Any], clips: bool
) -> None:
    for ran in gloo.run(_train, name, shape, options, clips, world_size=torch.Size(shape).numel()):
        kinds = [[op.partition("[")[0] for op in step] for step in ran]
        assert kinds[0].count("update") > kinds[2].count("update") > 0


@pytest.mark.parametrize(
    "options", [{"base": "sgd"}, {"base": "muon"}, {"base": "adamw", "replicator": DiLoCo(period=2)}], ids=str
)
def test_nodes_run_the_program(gloo: ProcessPool, options: dict[str, Any]) -> None:
    for ran in gloo.run(_train, "flexdemo", (2, 1), options, False, world_size=2):
        kinds = {op.partition("[")[0] for op in ran[0]}
        assert kinds == {"adamw"} | ({"momentum", "newton_schulz", "update"} if options["base"] == "muon" else set())


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
