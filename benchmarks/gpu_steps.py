"""What ``benchmarks/gpu.py`` steps: rank 0 of many in one process, and two processes on one device."""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from loopback import loopback_world
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_muon import FlexDeMo, FlexDeMoConfig, ModeOptions, ParallelMuon, make_mode
from lightning_muon.compat.torch import local_shape_and_offset
from lightning_muon.schedule.shapes import ParameterShape, read_shapes
from lightning_muon.sharding.base import ShardingMode
from lightning_muon.sharding.modes import Sharding

Parameters = Sequence[tuple[ParameterShape, nn.Parameter]]
_OVERLAPS = ("off", "step")


@contextmanager
def one_rank_of(
    size: int, shapes: str, *, device: str, replicas: int = 1, **settings: Any
) -> Iterator[tuple[ParallelMuon, Parameters]]:
    """A ParallelMuon as rank 0 of ``size`` has it for a named model, and the weights as ``fully_shard`` leaves them."""
    with loopback_world(size):
        mesh_shape = (size,) if replicas == 1 else (replicas, size // replicas)
        mesh = init_device_mesh(device, mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
        parameters = [(shape, _shard(shape, mesh, device)) for shape in _shapes(shapes) if not shape.frozen]
        groups = [
            {"params": [(shape.name, parameter) for shape, parameter in members], "algorithm": algorithm}
            for algorithm, members in _by_algorithm(parameters).items()
        ]
        fused = {shape.name: shape.splits for shape, _ in parameters if shape.splits}
        yield ParallelMuon(groups, fused=fused, **settings), parameters


def _by_algorithm(parameters: Parameters) -> dict[str, list[tuple[ParameterShape, nn.Parameter]]]:
    found: dict[str, list[tuple[ParameterShape, nn.Parameter]]] = defaultdict(list)
    for shape, parameter in parameters:
        found["adamw" if shape.kind == "elementwise" else "muon"].append((shape, parameter))
    return found


def _shapes(name: str) -> Sequence[ParameterShape]:
    if name != "small":
        return read_shapes(name).parameters
    layer = {"q": (64, 64), "up": (192, 64), "down": (64, 192), "norm": (64,)}
    named = {f"layers.{index}.{part}.weight": shape for index in range(4) for part, shape in layer.items()}
    return [
        ParameterShape(name=name, shape=shape, kind="matrix" if len(shape) == 2 else "elementwise")
        for name, shape in named.items()
    ]


def _shard(shape: ParameterShape, mesh: DeviceMesh, device: str) -> nn.Parameter:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    placements = (*(Replicate() for _ in range(mesh.ndim - 1)), Shard(shape.shard_dim) if shape.shape else Replicate())
    local_shape, _ = local_shape_and_offset(shape.shape, tuple(mesh.shape), coordinate, placements)
    local = torch.randn(local_shape, device=device) * 0.02
    stride = torch.empty(shape.shape, device="meta").stride()
    whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape.shape), stride=stride)
    return nn.Parameter(whole)


def backward_on_streams(parameters: Parameters, device: str) -> None:
    """Gradients as FSDP2's backward leaves them: unit by unit from the last, on a stream of its own, then the hooks."""
    units: dict[str, list[nn.Parameter]] = defaultdict(list)
    for shape, parameter in parameters:
        head, separator, tail = shape.name.partition("layers.")
        units[f"{head}{separator}{tail.split('.')[0]}" if separator else shape.name].append(parameter)
    stream = torch.cuda.Stream() if device == "cuda" else None
    for members in reversed(list(units.values())):
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(stream) if stream is not None else nullcontext():
            sizes = [parameter.to_local().numel() for parameter in members]
            flat = torch.randn(sum(sizes), device=device)
            for parameter, part in zip(members, flat.split(sizes), strict=True):
                local = part.view(parameter.to_local().shape)
                parameter.grad = DTensor.from_local(
                    local,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
                for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                    hook(parameter)
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


@dataclass(frozen=True, eq=False)
class OneRank:
    """A real model that one rank of many trains, with FSDP2, ZeRO-2 or DDP over a loopback."""

    model: nn.Module
    mode: ShardingMode
    optimizer: torch.optim.Optimizer
    device: str

    def backward(self) -> None:
        """Forward and backward of one batch, and what the mode does after it."""
        self.mode.begin_forward()
        self.model(torch.randn(32, 64, device=self.device)).square().mean().backward()
        self.mode.finish_gradients()

    def step(self) -> None:
        """The step of the optimizer, and what the mode does after it."""
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
        yield OneRank(model, mode, optimizer, device)
        mode.finish_parameters()
        mode.close()


def train_two_ranks(device: str) -> dict[str, Any]:
    """Train the same model with every overlap on two processes over gloo, and in one process; compare the weights.

    Gloo carries CUDA tensors in collectives, so two ranks can share one card, which NCCL refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A forked process imports nothing; CUDA does not survive a fork.
        method = "spawn" if device == "cuda" else "fork"
        mp.start_processes(_train_rank, (folder, device), nprocs=2, join=True, start_method=method)
        weights = torch.load(Path(folder, "weights.pt"))
    reference = _train("off", None, device, ranks=(0, 1))
    off = weights["off"]
    return {
        "same_bits": {
            overlap: all(torch.equal(a, b) for a, b in zip(weights[overlap], off, strict=True))
            for overlap in _OVERLAPS[1:]
        },
        "difference": max(
            ((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item() for a, b in zip(off, reference, strict=True)
        ),
    }


def _train_rank(rank: int, folder: str, device: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("shard",))
    weights = {overlap: _train(overlap, mesh, device, ranks=(rank,)) for overlap in _OVERLAPS}
    if rank == 0:
        torch.save(weights, Path(folder, "weights.pt"))
    dist.barrier()
    dist.destroy_process_group()


def _train(overlap: str, mesh: DeviceMesh | None, device: str, *, ranks: Sequence[int]) -> list[Tensor]:
    """Weights after five steps on the batches of ``ranks``; odd shapes, and float32 throughout."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(65, 130), nn.GELU(), nn.Linear(130, 65, bias=False)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(65, 1)).to(device)
    if mesh is not None:
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = ParallelMuon(model, lr=1e-2, overlap=overlap, compute_dtype="float32", wire_dtype="float32")  # type: ignore[arg-type]
    for step in range(5):
        batches = [torch.randn(32, 65, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
        losses = [model(batch.to(device)).square().mean() for batch in batches]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [_whole(parameter).detach().cpu() for parameter in model.parameters()]


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
