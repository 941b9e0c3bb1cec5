"""Time of one optimizer step on the same FSDP2-sharded matrices, as ratios in one run.

    python benchmarks/optimizer_step.py --meshes 2 4 2x2 --ns-quality fast

Starts gloo processes on this machine (one thread each) and takes turns between

- ParallelMuon,
- with ``--ns-quality fast`` ParallelMuon with that option,
- on a grid of replicas x shards also ParallelMuon with an owner in each replica (``dedupe="never"``),
- torch.optim.Muon on the same DTensors,
- the redundant algorithm: every rank gathers every matrix and repeats Newton-Schulz (Liu et al. 2025, section 2.3),
- with ``--dion FOLDER``, a clone of https://github.com/microsoft/dion, its Muon with our hyper-parameters, compiled as
  it compiles itself (which needs a C++ compiler),
- AdamW, which has no matrices to orthogonalize,
- the floor: Newton-Schulz of the matrices that each rank owns, with no momentum, no traffic and no update; the same
  for ``--ns-quality``.

The rounds are interleaved and the median is reported, so that a busy machine disturbs all of them alike; beside it
processor seconds of rank 0, median as well, which a busy machine disturbs less. The first round warms up and also
checks that ParallelMuon and the redundant algorithm give the same weights, and Dion's Muon those weights but for its
sums in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_muon import MuonConfig, ParallelMuon
from lightning_muon.config import NsQuality
from lightning_muon.math.coefficients import steps_of
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulz, NewtonSchulzOptions, lr_scale, orthogonalize
from lightning_muon.optim.planned_optimizer import resolve_compute_dtype
from lightning_muon.schedule.assign import longest_first

SHAPES = {
    # Attention and feed-forward matrices of T5 with 6 + 6 layers; (rows, cols, count).
    "t5-small": [(512, 512, 72), (2048, 512, 12), (512, 2048, 12)],
    "t5-mini": [(384, 384, 48), (1536, 384, 8), (384, 1536, 8)],
    "tiny": [(128, 128, 24), (512, 128, 4), (128, 512, 4)],
}
LR, WEIGHT_DECAY, MOMENTUM = 1e-3, 0.1, 0.95
Step = Callable[[], None]


def main() -> None:
    arguments = parse_arguments()
    rows = []
    for mesh_shape in arguments.meshes:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, args=(mesh_shape, arguments, folder), nprocs=math.prod(mesh_shape))
            rows.append(json.loads(Path(folder, "result.json").read_text()))
    print(table(rows, arguments.shapes))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--meshes", type=parse_mesh, nargs="+", default=[(2,), (4,), (2, 2)], help="ranks, or replicas x shards: 4 2x2"
    )
    parser.add_argument("--shapes", choices=SHAPES, default="t5-small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compute-dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--ns-quality", choices=("fast",), help="measure ParallelMuon with this option, too")
    parser.add_argument("--dion", type=Path, help="folder of microsoft/dion, to measure its Muon too")
    parser.add_argument("--chunk-bytes", type=int, default=MuonConfig.chunk_bytes)
    return parser.parse_args()


def parse_mesh(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def worker(rank: int, mesh_shape: tuple[int, ...], arguments: argparse.Namespace, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    num_ranks = math.prod(mesh_shape)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    contenders, weights = make_contenders(mesh, arguments)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    processor: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(arguments.rounds + 1):
        for name, step in contenders.items():
            dist.barrier()
            started, began = time.perf_counter(), time.process_time()
            step()
            used = time.process_time() - began
            dist.barrier()
            if round_:
                seconds[name].append(time.perf_counter() - started)
                processor[name].append(used)
        if round_ == 0:
            check_equal(weights["ParallelMuon"], weights["redundant all-gather"], atol=1e-6)
            if arguments.dion:
                # An update of LR * 0.2 * sqrt(2048) times entries of about 1 / sqrt(512), with 8 bits of mantissa.
                check_equal(weights["ParallelMuon"], weights["microsoft/dion's Muon"], atol=5e-5)
    if rank == 0:
        result = {
            "mesh": "x".join(map(str, mesh_shape)),
            "seconds": {name: statistics.median(values) for name, values in seconds.items()},
            "processor": {name: statistics.median(values) for name, values in processor.items()},
        }
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def make_contenders(
    mesh: DeviceMesh, arguments: argparse.Namespace
) -> tuple[dict[str, Step], dict[str, list[nn.Parameter]]]:
    """One optimizer step per name, each with its own copy of the same weights and gradients."""
    dtype = resolve_compute_dtype(arguments.compute_dtype, torch.device("cpu"))
    options = {"compute_dtype": arguments.compute_dtype, "chunk_bytes": arguments.chunk_bytes}
    makers: dict[str, Callable[[list[nn.Parameter]], Step]] = {
        "ParallelMuon": lambda params: ParallelMuon(params, LR, WEIGHT_DECAY, MOMENTUM, **options).step,
        "torch.optim.Muon": lambda params: (
            torch.optim.Muon(params, LR, WEIGHT_DECAY, MOMENTUM, adjust_lr_fn="match_rms_adamw").step
        ),
        "redundant all-gather": lambda params: RedundantMuon(params, dtype).step,
        "AdamW": lambda params: torch.optim.AdamW(params, LR, fused=True).step,
    }
    if arguments.dion:
        makers["microsoft/dion's Muon"] = partial(make_dion, mesh=mesh, folder=arguments.dion)
    if mesh.ndim == 2:
        makers['ParallelMuon, dedupe="never"'] = lambda params: (
            ParallelMuon(params, LR, WEIGHT_DECAY, MOMENTUM, dedupe="never", **options).step
        )
    if arguments.ns_quality:
        quality = {"ns_quality": arguments.ns_quality}
        makers[f'ParallelMuon, ns_quality="{arguments.ns_quality}"'] = lambda params: (
            ParallelMuon(params, LR, WEIGHT_DECAY, MOMENTUM, **options, **quality).step
        )
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    weights: dict[str, list[nn.Parameter]] = {}
    steps: dict[str, Step] = {}
    for name, make in makers.items():
        generator = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, generator=generator)
        weights[name] = [
            nn.Parameter(distribute_tensor(draw(rows, cols), mesh, placements))
            for rows, cols, count in SHAPES[arguments.shapes]
            for _ in range(count)
        ]
        for parameter in weights[name]:
            parameter.grad = distribute_tensor(draw(*parameter.shape), mesh, placements)
        steps[name] = make(weights[name])
    for quality in filter(None, ("reference", arguments.ns_quality)):
        steps[f"floor: Newton-Schulz alone, {quality}"] = make_floor(mesh, arguments.shapes, dtype, quality)
    return steps, weights


def make_dion(params: list[nn.Parameter], *, mesh: DeviceMesh, folder: Path) -> Step:
    sys.path.insert(0, str(folder.resolve()))
    from dion.muon import Muon

    return Muon(
        params,
        mesh["shard"],
        LR,
        MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        nesterov=True,
        adjust_lr="rms_norm",
        # Its own coefficients are other ones; as many steps of ours are as much work.
        newton_schulz_func=lambda matrix, epsilon: orthogonalize(
            matrix, steps=steps_of("jordan", 5), eps=1e-7, compute_dtype=torch.bfloat16
        ),
    ).step


def make_floor(mesh: DeviceMesh, shapes: str, dtype: torch.dtype, quality: NsQuality) -> Step:
    """Newton-Schulz of this rank's share, balanced by FLOPs."""
    sizes = [(rows, cols) for rows, cols, count in SHAPES[shapes] for _ in range(count)]
    options, arithmetic = NewtonSchulzOptions(quality, "jordan", 5), Arithmetic("cpu", dtype)
    costs = [options.flops(rows, cols, arithmetic) for rows, cols in sizes]
    owners = longest_first(costs, costs, [(0, 0)] * mesh.size(), taken=range(len(sizes)))
    mine = [torch.randn(size) for index, size in enumerate(sizes) if owners[index] == mesh.get_rank()]

    def step() -> None:
        for matrix in mine:
            options.choice(matrix.size(0), matrix.size(1), arithmetic).orthogonalize(matrix, eps=1e-7)

    return step


class RedundantMuon:
    """All-gather each momentum (the next one while this one computes), Newton-Schulz on every rank."""

    def __init__(self, params: list[nn.Parameter], dtype: torch.dtype) -> None:
        self.params, self.dtype = params, dtype
        self.buffers = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self) -> None:
        """Take one step; every rank must call it."""
        ahead: list[DTensor] = []
        for param, buffer in zip(self.params, self.buffers, strict=True):
            buffer.to_local().lerp_(param.grad.to_local(), 1 - MOMENTUM)
            local = param.grad.to_local().lerp(buffer.to_local(), MOMENTUM).to(self.dtype)
            ahead.append(DTensor.from_local(local, param.device_mesh, param.placements, run_check=False))
        whole = [Replicate()] * ahead[0].device_mesh.ndim
        following = ahead[0].redistribute(placements=whole, async_op=True)
        for index, param in enumerate(self.params):
            gathered = following.to_local()
            if index + 1 < len(ahead):
                following = ahead[index + 1].redistribute(placements=whole, async_op=True)
            self._update(param, gathered)

    def _update(self, param: nn.Parameter, whole: Tensor) -> None:
        update = orthogonalize(whole, steps=steps_of("jordan", 5), eps=1e-7, compute_dtype=self.dtype)
        mesh = param.device_mesh
        mine = update.chunk(mesh.size(-1))[mesh.get_local_rank(mesh.ndim - 1)]
        local = param.to_local()
        local.mul_(1 - LR * WEIGHT_DECAY)
        local.add_(mine, alpha=-LR * lr_scale(*param.shape, "match_rms_adamw"))


def check_equal(mine: list[nn.Parameter], others: list[nn.Parameter], *, atol: float) -> None:
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one.to_local(), other.to_local(), rtol=0, atol=atol)


def table(rows: list[dict], shapes: str) -> str:
    default = NewtonSchulz(steps_of("jordan", 5), torch.bfloat16)
    flops = sum(default.flops(r, c) * n for r, c, n in SHAPES[shapes])
    lines = [
        f"{shapes}: {flops / 1e9:.0f} GFLOP of Newton-Schulz per step",
        "| mesh | optimizer | ms per step | of torch.optim.Muon | processor ms | of torch.optim.Muon |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        for name in row["seconds"]:
            cells = [row["mesh"], name]
            for kind in ("seconds", "processor"):
                value, base = row[kind][name], row[kind]["torch.optim.Muon"]
                cells += [f"{1e3 * value:.0f}", f"{value / base:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
