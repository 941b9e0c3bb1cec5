"""What ``make gpu`` steps: rank 0 of many in one process, and two processes on one device."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.gpu.loopback import loopback_world
from benchmarks.ranks import new_gradient_, sharded_muon
from lightning_muon import FlexDeMo, FlexDeMoConfig, ModeOptions, ParallelMuon, make_mode
from lightning_muon.config import Overlap
from lightning_muon.params.shapes import read_shapes
from lightning_muon.sharding.base import ShardingMode
from lightning_muon.sharding.modes import Sharding


@contextmanager
def one_rank_of(size: int, shapes: str, *, device: str, replicas: int = 1) -> Iterator[ParallelMuon]:
    """A ParallelMuon as rank 0 of ``size`` has it for a named model, on weights as ``fully_shard`` leaves them."""
    with loopback_world(size):
        yield sharded_muon(read_shapes(shapes).parameters, replicas, device)


def backward_on_stream(optimizer: ParallelMuon, device: str) -> None:
    """Gradients as FSDP2's backward leaves them: from the last to the first, on a stream of its own."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stream = torch.cuda.Stream() if device == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        for parameter in reversed(parameters):
            new_gradient_(parameter)
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


@dataclass(frozen=True, eq=False)
class OneRank:
    """A real model that one rank of many trains, with FSDP2, ZeRO-2 or DDP over a loopback."""

    mode: ShardingMode
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]  # Of a batch.

    def backward(self) -> None:
        """Leave the gradients of a batch in the parameters."""
        self.mode.begin_forward()
        self.loss().backward()
        self.mode.finish_gradients()

    def step(self) -> None:
        """Take the step of the optimizer."""
        self.optimizer.step()
        self.mode.end_step()
        self.optimizer.zero_grad()


@contextmanager
def one_rank_of_mode(
    name: Sharding, *, device: str, mesh_shape: tuple[int, ...] = (8,), nodes: FlexDeMoConfig | None = None, **muon: Any
) -> Iterator[OneRank]:
    """Rank 0 of a mesh that trains a small model; with ``nodes`` on FlexDeMo, else on ParallelMuon."""
    size = math.prod(mesh_shape)
    with loopback_world(size):
        mesh = init_device_mesh(device, mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
        blocks = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4)]
        model = nn.Sequential(*blocks).to(device)
        mode = make_mode(name, mesh, ModeOptions(decoupled_nodes=nodes is not None))
        mode.prepare(model)
        optimizer = FlexDeMo.from_config(model, nodes) if nodes is not None else ParallelMuon(model, lr=1e-3, **muon)
        mode.attach(model, [optimizer])
        yield OneRank(mode, optimizer, lambda: model(torch.randn(32, 64, device=device)).square().mean())
        mode.finish_parameters()
        mode.close()


def train_two_ranks(sharding: Sharding, device: str) -> tuple[bool, float]:
    """Train a model on two processes over gloo, and in one process.

    Gloo carries CUDA tensors in collectives, so two ranks can share one card, which NCCL refuses.

    Returns:
        Whether overlap keeps the bits of the weights, and their largest difference to those of one process.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A forked process imports nothing; CUDA does not survive a fork.
        method = "spawn" if device == "cuda" else "fork"
        mp.start_processes(_train_rank, (folder, sharding, device), nprocs=2, join=True, start_method=method)
        weights = torch.load(Path(folder, "weights.pt"))
    reference = _train("off", None, sharding, device, ranks=(0, 1))
    off = weights["off"]
    pairs = zip(off, reference, strict=True)
    difference = torch.stack([(a - b).abs().max() / b.abs().max().clamp(min=1e-6) for a, b in pairs]).max().item()
    return all(map(torch.equal, weights["step"], off)), difference


def _train_rank(rank: int, folder: str, sharding: Sharding, device: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("shard",))
    overlaps: tuple[Overlap, ...] = ("off", "step")
    weights = {overlap: _train(overlap, mesh, sharding, device, ranks=(rank,)) for overlap in overlaps}
    if rank == 0:
        torch.save(weights, Path(folder, "weights.pt"))
    dist.barrier()
    dist.destroy_process_group()


def _train(
    overlap: Overlap, mesh: DeviceMesh | None, sharding: Sharding, device: str, *, ranks: Sequence[int]
) -> list[Tensor]:
    """Weights after five steps on the batches of ``ranks``; odd shapes, and float32 throughout."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(65, 130), nn.GELU(), nn.Linear(130, 65, bias=False)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(65, 1)).to(device)
    mode = None if mesh is None else make_mode(sharding, mesh, ModeOptions())
    if mode is not None:
        mode.prepare(model)
    optimizer = ParallelMuon(model, lr=1e-2, overlap=overlap, compute_dtype="float32", wire_dtype="float32")
    if mode is not None:
        mode.attach(model, [optimizer])
    for step in range(5):
        batches = [torch.randn(32, 65, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
        if mode is not None:
            mode.begin_forward()
        losses = [model(batch.to(device)).square().mean() for batch in batches]
        torch.stack(losses).mean().backward()
        if mode is not None:
            mode.finish_gradients()
        optimizer.step()
        if mode is not None:
            mode.end_step()
        optimizer.zero_grad()
    if mode is not None:
        mode.finish_parameters()
        mode.close()
    return [_whole(parameter) for parameter in model.parameters()]


def _whole(parameter: Tensor) -> Tensor:
    """All of a parameter, in the memory of the host: gloo ends a process in which torch gathers a DTensor of a card."""
    if not isinstance(parameter, DTensor):
        return parameter.detach().cpu()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local, placements = parameter.detach().to_local().cpu(), parameter.placements
    return DTensor.from_local(local, mesh, placements, shape=parameter.shape, stride=parameter.stride()).full_tensor()
