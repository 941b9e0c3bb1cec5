"""Rate of Newton-Schulz by shape and dtype, against torch's own and against a plain matrix product, in one run.

    python benchmarks/newton_schulz.py
    python benchmarks/newton_schulz.py --shapes 4096x4096 8192x28672 --dtypes bfloat16     # on a CUDA device

GFLOP/s are textbook FLOPs (``newton_schulz_flops``) per second: what is computed by half counts in full, so the rate
may exceed that of a product. "torch" is the function that torch.optim.Muon calls, which knows bfloat16 only. "ceiling"
is the rate of the product of two square matrices with the short side. The candidates take turns and the fastest of each
counts, since other work on the machine only ever adds. A second table compares batches with one matrix after the other,
a third one coefficients and methods with the default: measured, by FLOPs, and how far the singular values from 0.01 of
the norm on are from 1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from lightning_muon.config import MuonConfig
from lightning_muon.math.coefficients import steps_of
from lightning_muon.math.methods import NewtonSchulz
from lightning_muon.math.newton_schulz import newton_schulz_flops, orthogonalize, worth_batching
from lightning_muon.math.symmetric import share_of_full_product

SHAPES = {
    "cpu": ["128x128", "256x256", "512x512", "512x2048", "2048x512", "768x3072", "1024x1024", "2048x2048"],
    "cuda": ["512x512", "1024x1024", "2048x2048", "4096x4096", "4096x14336", "14336x4096", "8192x8192"],
}
BATCHED = {"cpu": ["64x64", "64x256", "128x128", "256x256", "512x512"], "cuda": ["256x256", "512x512", "1024x1024"]}
BATCH = 8
WAYS = {
    f"{preset} {num_steps} {method}": NewtonSchulz(steps_of(preset, num_steps), method)
    for preset, num_steps in (("jordan", 5), ("polar_express", 5), ("cubic", 5))
    for method in ("plain", "gram")
}


def main() -> None:
    arguments = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else f'{torch.get_num_threads()} CPU threads'}")
    print("| shape | dtype | GFLOP/s | of torch's time | ceiling GFLOP/s | of the ceiling |")
    print("| --- | --- | --- | --- | --- | --- |")
    for dtype in (getattr(torch, name) for name in arguments.dtypes):
        for rows, cols in map(parse_shape, arguments.shapes or SHAPES[device]):
            print(row(torch.randn(rows, cols, device=device), dtype, arguments.seconds), flush=True)
    print(f"\n| shape | dtype | {BATCH} as a batch, of one after the other | worth_batching |")
    print("| --- | --- | --- | --- |")
    for dtype in (getattr(torch, name) for name in arguments.dtypes):
        for rows, cols in map(parse_shape, BATCHED[device]):
            print(batch_row(torch.randn(BATCH, rows, cols, device=device), dtype, arguments.seconds), flush=True)
    print(f"\n| shape | dtype | {' | '.join(WAYS)} |")
    print(f"| --- | --- |{' --- |' * len(WAYS)}")
    for dtype in (getattr(torch, name) for name in arguments.dtypes):
        for rows, cols in map(parse_shape, arguments.shapes or SHAPES[device]):
            print(ways_row(torch.randn(rows, cols, device=device), dtype, arguments.seconds), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", metavar="ROWSxCOLS")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    return parser.parse_args()


def parse_shape(text: str) -> tuple[int, int]:
    rows, cols = text.split("x")
    return int(rows), int(cols)


def row(matrix: Tensor, dtype: torch.dtype, seconds: float) -> str:
    rows, cols = matrix.shape
    short = min(rows, cols)
    square = torch.randn(short, short, device=matrix.device).to(dtype)
    candidates: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: ours(matrix, dtype),
        "product": lambda: square @ square,
    }
    if dtype == torch.bfloat16:
        candidates["torch"] = lambda: _zeropower_via_newtonschulz(
            matrix, MuonConfig.ns_coefficients, MuonConfig.ns_steps, MuonConfig.eps
        )
    best = fastest(candidates, seconds)
    rate = newton_schulz_flops(rows, cols, MuonConfig.ns_steps) / best["ours"]
    ceiling = 2 * short**3 / best["product"]
    of_torch = f"{best['ours'] / best['torch']:.2f}" if "torch" in best else "-"
    return (
        f"| {rows} x {cols} | {name_of(dtype)} | {rate / 1e9:.0f} | {of_torch} | {ceiling / 1e9:.0f} | "
        f"{rate / ceiling:.2f} |"
    )


def batch_row(batch: Tensor, dtype: torch.dtype, seconds: float) -> str:
    best = fastest(
        {"batch": lambda: ours(batch, dtype), "single": lambda: [ours(matrix, dtype) for matrix in batch]}, seconds
    )
    rows, cols = batch.shape[1:]
    worth = worth_batching(rows, cols, batch.device.type)
    return f"| {rows} x {cols} | {name_of(dtype)} | {best['batch'] / best['single']:.2f} | {worth} |"


def ways_row(matrix: Tensor, dtype: torch.dtype, seconds: float) -> str:
    """For each way its time and its FLOPs, of those of the default, and the largest error of a singular value."""
    rows, cols = matrix.shape
    share = share_of_full_product(min(rows, cols), matrix.device.type)
    best = fastest(
        {
            name: partial(way.orthogonalize, matrix, eps=MuonConfig.eps, compute_dtype=dtype)
            for name, way in WAYS.items()
        },
        seconds,
    )
    flops = {name: way.flops(rows, cols, dtype, symmetric=share) for name, way in WAYS.items()}
    is_large = torch.linalg.svdvals(matrix) >= 0.01 * matrix.norm()
    cells: list[str] = []
    for name, way in WAYS.items():
        found = torch.linalg.svdvals(way.orthogonalize(matrix, eps=MuonConfig.eps, compute_dtype=dtype).float())
        error = (found[: int(is_large.sum())] - 1).abs().max()
        cells.append(
            f"{best[name] / best['jordan 5 plain']:.2f}, {flops[name] / flops['jordan 5 plain']:.2f}, {error:.2f}"
        )
    return f"| {rows} x {cols} | {name_of(dtype)} | {' | '.join(cells)} |"


def ours(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return orthogonalize(
        matrix,
        steps=steps_of(MuonConfig.ns_coefficients, MuonConfig.ns_steps),
        eps=MuonConfig.eps,
        compute_dtype=dtype,
    )


def fastest(candidates: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Seconds of the fastest call of each, in turns."""
    best = dict.fromkeys(candidates, float("inf"))
    for run in candidates.values():
        run()
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for name, run in candidates.items():
            synchronize()
            started = time.perf_counter()
            run()
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
