"""Time of Newton-Schulz by shape, dtype and method, against torch's own, in one run.

    python -m benchmarks.newton_schulz                                     # three minutes
    python -m benchmarks.newton_schulz --shapes 4096x4096 8192x28672 --dtypes bfloat16     # on a CUDA device

The candidates take turns and the fastest of each counts, since other work on the machine only ever adds. Of each method
the table has its time beside that of the function that torch.optim.Muon calls, and in brackets its FLOPs, halves
counted as such.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from benchmarks.tables import markdown, origin, parser_of
from lightning_muon.compat.torch import cpu_multiplies_bfloat16_fast
from lightning_muon.config import MuonConfig
from lightning_muon.math.newton_schulz import (
    FAST,
    NewtonSchulz,
    gram_restarts,
    share_of_full_product,
    steps_of,
    worth_batching,
)

synchronize = torch.cuda.synchronize if torch.cuda.is_available() else torch.cpu.synchronize
SHAPES = {
    "cpu": ["256x256", "256x1024", "8x256x1024", "512x512", "512x2048", "1024x1024"],
    "cuda": ["512x512", "1024x1024", "2048x2048", "4096x4096", "4096x14336", "14336x4096", "8192x8192"],
}
PRESETS = {"jordan 5": steps_of("jordan", 5), "polar_express 5": steps_of("polar_express", 5), "fast 3": FAST}
DEFAULT = "jordan 5, plain"

Ways = Mapping[str, NewtonSchulz]


def main() -> None:
    arguments = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else f'{torch.get_num_threads()} CPU threads'}\n")
    rows: list[list[str]] = []
    for name in arguments.dtypes:
        for text in arguments.shapes or SHAPES[device]:
            matrix = torch.randn([int(size) for size in text.split("x")], device=device)
            rows.append([text, name, *measure(matrix, getattr(torch, name), arguments.seconds)])
    print(markdown(["shape", "dtype", *ways_of(torch.float32)], rows))
    print(origin(__spec__.name))


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, {"seconds": 2.0})
    parser.add_argument("--shapes", nargs="+", metavar="[BATCHx]ROWSxCOLS")
    # Without units for bfloat16 it is a hundred times as slow, and nobody would take it.
    is_fast = torch.cuda.is_available() or cpu_multiplies_bfloat16_fast()
    default = ["bfloat16", "float32"] if is_fast else ["float32"]
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=default)
    return parser.parse_args()


def ways_of(dtype: torch.dtype) -> Ways:
    return {
        f"{name}, {method}": NewtonSchulz(steps, dtype, method)
        for name, steps in PRESETS.items()
        for method in ("plain", "gram")
    }


def measure(matrix: Tensor, dtype: torch.dtype, seconds: float) -> list[str]:
    """Cells of the table: all ways on a matrix, or a batch as the optimizer takes it, beside torch's on each matrix."""
    *_, rows, cols = matrix.shape
    members, ways, short = matrix.view(-1, rows, cols), ways_of(dtype), min(rows, cols)
    as_batch = worth_batching(rows, cols, matrix.device.type)
    stacks = [members] if as_batch else members.split(1)

    def orthogonalize_all(way: NewtonSchulz) -> list[Tensor]:
        return [way.orthogonalize(stack, eps=MuonConfig.eps) for stack in stacks]

    candidates: dict[str, Callable[[], object]] = {"torch": lambda: [by_torch(each, dtype) for each in members]}
    best = fastest(candidates | {name: partial(orthogonalize_all, way) for name, way in ways.items()}, seconds)
    share = 1.0 if as_batch and len(members) > 1 else share_of_full_product(short, matrix.device.type)
    flops_of_torch = ways[DEFAULT].flops(rows, cols)
    flops = {name: halved_flops(way, rows, cols, share) / flops_of_torch for name, way in ways.items()}
    return [f"{best[name] / best['torch']:.2f} ({flops[name]:.2f})" for name in ways]


def halved_flops(way: NewtonSchulz, rows: int, cols: int, share: float) -> float:
    """FLOPs of all products, of those with a symmetric result this share; every step has a fifth power."""
    short, long = sorted((rows, cols))
    num_steps = len(way.steps)
    num_parts = num_steps if way.method == "plain" else len(gram_restarts(way.steps, way.dtype)) + 1
    num_small = num_steps + 3 * (num_steps - num_parts)
    return 2 * short * short * ((1 + share) * num_parts * long + share * num_small * short)


def by_torch(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """What torch.optim.Muon does, in another dtype too."""
    if dtype == torch.bfloat16:
        return _zeropower_via_newtonschulz(matrix, MuonConfig.ns_coefficients, MuonConfig.ns_steps, MuonConfig.eps)
    a, b, c = MuonConfig.ns_coefficients
    x = matrix.to(dtype)
    x = x.mT if x.size(0) > x.size(1) else x
    x = x / x.norm().clamp(min=MuonConfig.eps)
    for _ in range(MuonConfig.ns_steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrix.size(0) > matrix.size(1) else x


def fastest(candidates: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Seconds of the fastest call of each, in turns; of the second one where a round takes longer than ``seconds``."""
    best = dict.fromkeys(candidates, math.inf)
    for call in candidates.values():
        call()  # Loads libraries and touches memory.
    deadline = time.perf_counter() + seconds
    while math.inf in best.values() or time.perf_counter() < deadline:
        for name, call in candidates.items():
            synchronize()
            started = time.perf_counter()
            call()
            synchronize()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


if __name__ == "__main__":
    main()
