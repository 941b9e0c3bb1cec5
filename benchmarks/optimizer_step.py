"""Time of one optimizer step on the same FSDP2-sharded matrices, as ratios in one run.

    python -m benchmarks.optimizer_step --meshes 2 4 2x2 --ns-quality fast

Takes turns between ParallelMuon and others: the redundant algorithm, in which every rank gathers every matrix and
repeats Newton-Schulz (Liu et al. 2025, section 2.3); with ``--dion FOLDER``, a clone of microsoft/dion, its Muon with
our hyper-parameters, compiled as it compiles itself; and the floor, Newton-Schulz of the matrices that each rank owns,
with no momentum, no traffic and no update.

The median of the rounds is reported. The first round warms up and checks that weights are equal, those of Dion's Muon
but for its sums in bfloat16.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.ranks import run_on_ranks
from benchmarks.tables import markdown, origin, parser_of
from lightning_muon import ParallelMuon
from lightning_muon.config import NsQuality
from lightning_muon.math import newton_schulz as ns
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulz, lr_scale, orthogonalize
from lightning_muon.optim.parallel_muon import resolve_compute_dtype
from lightning_muon.schedule.exchange import longest_first

SHAPES = {
    # Attention and feed-forward matrices of T5 with 6 + 6 layers; (rows, cols, count).
    "t5-small": [(512, 512, 72), (2048, 512, 12), (512, 2048, 12)],
    "tiny": [(128, 128, 4), (512, 128, 2), (128, 512, 2)],
}
LR, WEIGHT_DECAY, MOMENTUM = 1e-3, 0.1, 0.95
Step = Callable[[], None]
Row = dict[str, float]  # Contender -> seconds.


def main() -> None:
    arguments = parse_arguments()
    rows: dict[str, Row] = {}
    for mesh in arguments.meshes:
        shape = tuple(map(int, mesh.split("x")))
        rows[mesh] = run_on_ranks(worker, shape, arguments, num_ranks=math.prod(shape))
    print(table(rows, arguments.shapes))
    print(origin(__spec__.name))


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, {"rounds": 5})
    parser.add_argument("--meshes", nargs="+", default=["2", "4", "2x2"], help="ranks, or replicas x shards: 4 2x2")
    parser.add_argument("--shapes", choices=SHAPES, default="t5-small")
    parser.add_argument("--ns-quality", choices=("fast",), help="measure ParallelMuon with this option, too")
    parser.add_argument("--dion", type=Path, help="folder of microsoft/dion, to measure its Muon too")
    return parser.parse_args()


def worker(mesh_shape: tuple[int, ...], arguments: argparse.Namespace) -> Row:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    contenders, weights = make_contenders(mesh, arguments)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(arguments.rounds + 1):
        for name, step in contenders.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            dist.barrier()
            times[name].append(time.perf_counter() - started)
        if round_ == 0:
            check_equal(weights["ParallelMuon"], weights["redundant all-gather"], atol=1e-6)
            if arguments.dion:
                # An update of LR * 0.2 * sqrt(2048) times entries of about 1 / sqrt(512), with 8 bits of mantissa.
                check_equal(weights["ParallelMuon"], weights["microsoft/dion's Muon"], atol=5e-5)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def make_contenders(
    mesh: DeviceMesh, arguments: argparse.Namespace
) -> tuple[dict[str, Step], dict[str, list[nn.Parameter]]]:
    """One optimizer step per name, each with its own copy of the same weights and gradients."""
    dtype = resolve_compute_dtype("auto", torch.device("cpu"))
    options: dict[str, Any] = {"lr": LR, "weight_decay": WEIGHT_DECAY, "momentum": MOMENTUM}
    muon = partial(ParallelMuon, **options)
    makers: dict[str, Callable[[list[nn.Parameter]], Any]] = {
        "ParallelMuon": muon,
        "torch.optim.Muon": partial(torch.optim.Muon, **options, adjust_lr_fn="match_rms_adamw"),
        "redundant all-gather": partial(RedundantMuon, dtype=dtype),
        "AdamW": partial(torch.optim.AdamW, lr=LR, fused=True),
    }
    if arguments.dion:
        makers["microsoft/dion's Muon"] = partial(make_dion, mesh=mesh, folder=arguments.dion)
    if mesh.ndim == 2:
        makers['ParallelMuon, dedupe="never"'] = partial(muon, dedupe="never")
    if arguments.ns_quality:
        name = f'ParallelMuon, ns_quality="{arguments.ns_quality}"'
        makers[name] = partial(muon, ns_quality=arguments.ns_quality)
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
        steps[name] = make(weights[name]).step
    for quality in filter(None, ("reference", arguments.ns_quality)):
        steps[f"floor: Newton-Schulz alone, {quality}"] = make_floor(mesh, arguments.shapes, dtype, quality)
    return steps, weights


def make_dion(params: list[nn.Parameter], *, mesh: DeviceMesh, folder: Path) -> Any:
    sys.path.insert(0, str(folder.resolve()))
    from dion.muon import Muon

    def newton_schulz(matrix: Tensor, epsilon: float) -> Tensor:
        """Its own coefficients are other ones; as many steps of ours are as much work."""
        return orthogonalize(matrix, steps=ns.steps_of("jordan", 5), eps=1e-7, compute_dtype=torch.bfloat16)

    options: dict[str, Any] = {"weight_decay": WEIGHT_DECAY, "nesterov": True, "adjust_lr": "rms_norm"}
    return Muon(params, mesh["shard"], LR, MOMENTUM, newton_schulz_func=newton_schulz, **options)


def make_floor(mesh: DeviceMesh, shapes: str, dtype: torch.dtype, quality: NsQuality) -> Step:
    """Newton-Schulz of this rank's share, balanced by FLOPs."""
    sizes = [(rows, cols) for rows, cols, count in SHAPES[shapes] for _ in range(count)]
    options, arithmetic = ns.NewtonSchulzOptions(quality, "jordan", 5), Arithmetic("cpu", dtype)
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
        update = orthogonalize(whole, steps=ns.steps_of("jordan", 5), eps=1e-7, compute_dtype=self.dtype)
        mesh = param.device_mesh
        mine = update.chunk(mesh.size(-1))[mesh.get_local_rank(mesh.ndim - 1)]
        local = param.to_local()
        local.mul_(1 - LR * WEIGHT_DECAY)
        local.add_(mine, alpha=-LR * lr_scale(*param.shape, "match_rms_adamw"))


def check_equal(mine: list[nn.Parameter], others: list[nn.Parameter], *, atol: float) -> None:
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one.to_local(), other.to_local(), rtol=0, atol=atol)


def table(rows: dict[str, Row], shapes: str) -> str:
    newton_schulz = NewtonSchulz(ns.steps_of("jordan", 5), torch.float32)
    flops = sum(newton_schulz.flops(r, c) * n for r, c, n in SHAPES[shapes])
    cells: list[list[str]] = []
    for mesh, row in rows.items():
        for name, value in row.items():
            cells.append([mesh, name, f"{1e3 * value:.0f}", f"{value / row['torch.optim.Muon']:.3f}"])
    heads = ["mesh", "optimizer", "ms per step", "of torch.optim.Muon"]
    return f"{shapes}: {flops / 1e9:.0f} GFLOP of Newton-Schulz per step\n\n{markdown(heads, cells)}"


if __name__ == "__main__":
    main()
