"""Rate of Newton-Schulz by shape and dtype, against torch's own and against a plain matrix product, in one run.

    python -m benchmarks.newton_schulz                                     # three minutes
    python -m benchmarks.newton_schulz --shapes 4096x4096 8192x28672 --dtypes bfloat16     # on a CUDA device

GFLOP/s are textbook FLOPs (``NewtonSchulz.flops``) per second: what is computed by half counts in full, so the rate
may exceed that of a product. "torch" is the function that torch.optim.Muon calls, which knows bfloat16 only; for other
dtypes the same products by torch. "ceiling" is the rate of the product of two square matrices with the short side. The
candidates take turns and the fastest of each counts, since other work on the machine only ever adds.

Then all methods: their time beside that of torch's products, and in brackets their FLOPs, halves counted as such; and
how far singular values of at least 0.01 of the norm are from 1, for sides of at most 512. Matrices that the optimizer
does not batch are measured alone: eight take eight times as long.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from lightning_muon.compat.torch import cpu_multiplies_bfloat16_fast
from lightning_muon.config import MuonConfig, NsMethod, Quintic
from lightning_muon.math.coefficients import FAST, steps_of
from lightning_muon.math.newton_schulz import NewtonSchulz, gram_restarts, orthogonalize, worth_batching
from lightning_muon.math.symmetric import share_of_full_product

SHAPES = {
    "cpu": ["128x128", "256x256", "512x512", "512x2048", "2048x512", "768x3072", "1024x1024", "2048x2048"],
    "cuda": ["512x512", "1024x1024", "2048x2048", "4096x4096", "4096x14336", "14336x4096", "8192x8192"],
}
DEFAULT = ["256x256", "256x1024", "8x256x1024", "512x512", "512x2048", "1024x1024"]
PRESETS = {"jordan 5": steps_of("jordan", 5), "polar_express 5": steps_of("polar_express", 5), "fast 3": FAST}
METHODS: tuple[NsMethod, ...] = ("plain", "gram")
_MOST_FOR_ERROR = 512


@dataclass(frozen=True)
class Found:
    """One method on one shape."""

    seconds: float
    of_torch: float  # Of the time of torch's products.
    flops: float  # Of the FLOPs of torch's products.
    error: float  # The largest one of a singular value.


Ways = Mapping[str, NewtonSchulz]


def main() -> None:
    arguments = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes: list[torch.dtype] = [getattr(torch, name) for name in arguments.dtypes]
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else f'{torch.get_num_threads()} CPU threads'}")
    if arguments.rates:
        print_rates(arguments, device, dtypes)
    texts = arguments.shapes or DEFAULT
    ways = {dtype: ways_of(PRESETS, dtype) for dtype in dtypes}
    names = list(ways[dtypes[0]])
    found: dict[tuple[torch.dtype, str], dict[str, Found]] = {}
    print(f"\nOf torch's time (of its FLOPs):\n\n| shape | dtype | {' | '.join(names)} |")
    print(f"| --- | --- |{' ---: |' * len(names)}")
    for dtype in dtypes:
        for text in texts:
            matrix = torch.randn(parse_shape(text), device=device)
            found[dtype, text] = measure(matrix, dtype, ways[dtype], arguments.seconds)
            cells = [f"{each.of_torch:.2f} ({each.flops:.2f})" for each in found[dtype, text].values()]
            print(f"| {text} | {name_of(dtype)} | {' | '.join(cells)} |", flush=True)
    print("\nLargest error of a singular value, any shape:\n")
    print(f"| dtype | {' | '.join(names)} |\n| --- |{' ---: |' * len(names)}")
    for dtype in dtypes:
        errors = [max(of_ways[name].error for (its, _), of_ways in found.items() if its == dtype) for name in names]
        print(f"| {name_of(dtype)} | {' | '.join(f'{error:.3f}' for error in errors)} |")


def ways_of(presets: Mapping[str, tuple[Quintic, ...]], dtype: torch.dtype) -> Ways:
    return {
        f"{name}, {method}": NewtonSchulz(steps, dtype, method) for name, steps in presets.items() for method in METHODS
    }


def print_rates(arguments: argparse.Namespace, device: str, dtypes: Sequence[torch.dtype]) -> None:
    """The table of the default method."""
    shapes = [text for text in arguments.shapes or SHAPES[device] if text.count("x") == 1]
    print("| shape | dtype | GFLOP/s | of torch's time | ceiling GFLOP/s | of the ceiling |")
    print("| --- | --- | --- | --- | --- | --- |")
    for dtype in dtypes:
        for shape in map(parse_shape, shapes):
            print(row(torch.randn(shape, device=device), dtype, arguments.seconds), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", metavar="[BATCHx]ROWSxCOLS")
    # Without units for bfloat16 it is a hundred times as slow, and nobody would take it.
    is_fast = torch.cuda.is_available() or cpu_multiplies_bfloat16_fast()
    default = ["bfloat16", "float32"] if is_fast else ["float32"]
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=default)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    parser.add_argument("--rates", action=argparse.BooleanOptionalAction, default=True, help="the first table")
    return parser.parse_args()


def parse_shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def row(matrix: Tensor, dtype: torch.dtype, seconds: float) -> str:
    rows, cols = matrix.shape
    short = min(rows, cols)
    square = torch.randn(short, short, device=matrix.device).to(dtype)
    candidates: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: ours(matrix, dtype),
        "product": lambda: square @ square,
        "torch": lambda: by_torch(matrix, dtype),
    }
    best = fastest(candidates, seconds)
    rate = NewtonSchulz(PRESETS["jordan 5"], dtype).flops(rows, cols) / best["ours"]
    ceiling = 2 * short**3 / best["product"]
    return (
        f"| {rows} x {cols} | {name_of(dtype)} | {rate / 1e9:.0f} | {best['ours'] / best['torch']:.2f} | "
        f"{ceiling / 1e9:.0f} | {rate / ceiling:.2f} |"
    )


def measure(matrix: Tensor, dtype: torch.dtype, ways: Ways, seconds: float) -> dict[str, Found]:
    """All ways on a matrix, or on a batch as the optimizer takes it, beside torch's products on one after the other."""
    *_, rows, cols = matrix.shape
    members = matrix.view(-1, rows, cols)
    as_batch = worth_batching(rows, cols, matrix.device.type)
    stacks = [members] if as_batch else members.split(1)

    def orthogonalize_all(way: NewtonSchulz) -> list[Tensor]:
        return [way.orthogonalize(stack, eps=MuonConfig.eps) for stack in stacks]

    candidates: dict[str, Callable[[], object]] = {name: partial(orthogonalize_all, way) for name, way in ways.items()}
    best = fastest(candidates | {"torch": lambda: [by_torch(each, dtype) for each in members]}, seconds)
    share = 1.0 if as_batch and len(members) > 1 else share_of_full_product(min(rows, cols), matrix.device.type)
    flops_of_torch = NewtonSchulz(PRESETS["jordan 5"], dtype).flops(rows, cols)
    # Of large matrices a part: their singular values would take longer than all else.
    part = members[0][: _MOST_FOR_ERROR * max(1, rows // cols), : _MOST_FOR_ERROR * max(1, cols // rows)]
    left, singular, right = torch.linalg.svd(part, full_matrices=False)
    is_large = singular >= 0.01 * part.norm()
    found: dict[str, Found] = {}
    for name, way in ways.items():
        update = way.orthogonalize(part, eps=MuonConfig.eps)
        values = (left.mT @ update.float() @ right.mT).diagonal()[is_large]
        error = (values - 1).abs().max().item()
        flops = halved_flops(way, rows, cols, share) / flops_of_torch
        found[name] = Found(best[name], best[name] / best["torch"], flops, error)
    return found


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


def ours(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return orthogonalize(
        matrix,
        steps=steps_of(MuonConfig.ns_coefficients, MuonConfig.ns_steps),
        eps=MuonConfig.eps,
        compute_dtype=dtype,
    )


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


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
