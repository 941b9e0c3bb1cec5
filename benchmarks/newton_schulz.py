"""Rate of Newton-Schulz by shape and dtype, against torch's own and against a plain matrix product, in one run.

    python benchmarks/newton_schulz.py                                     # three minutes
    python benchmarks/newton_schulz.py --all --no-rates --draw FILE.svg    # five minutes on one core
    python benchmarks/newton_schulz.py --shapes 4096x4096 8192x28672 --dtypes bfloat16     # on a CUDA device

GFLOP/s are textbook FLOPs (``newton_schulz_flops``) per second: what is computed by half counts in full, so the rate
may exceed that of a product. "torch" is the function that torch.optim.Muon calls, which knows bfloat16 only; for other
dtypes the same products by torch. "ceiling" is the rate of the product of two square matrices with the short side. The
candidates take turns and the fastest of each counts, since other work on the machine only ever adds. A second table
compares batches with one matrix after the other.

Then all methods: their time beside that of torch's products, with their FLOPs in brackets; how far singular values of
at least 0.01 of the norm are from 1, for sides of at most 512; and what ns_quality chooses, by FLOPs and by measured
costs of products (ns_costs), with its time beside the fastest method that keeps the same promise. Matrices that the
optimizer does not batch are measured alone: eight take eight times as long. --draw makes a picture of errors and times.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from lightning_muon.compat.torch import cpu_multiplies_bfloat16_fast
from lightning_muon.config import MuonConfig, NsMethod, Quintic
from lightning_muon.math.coefficients import band, polar_express, steps_of
from lightning_muon.math.methods import Arithmetic, NewtonSchulz, NewtonSchulzOptions
from lightning_muon.math.newton_schulz import newton_schulz_flops, orthogonalize, worth_batching
from lightning_muon.math.product_costs import product_flops
from lightning_muon.math.symmetric import share_of_full_product
from lightning_muon.monitor.measure_products import fastest as fastest_call
from lightning_muon.monitor.measure_products import measure_costs

SHAPES = {
    "cpu": ["128x128", "256x256", "512x512", "512x2048", "2048x512", "768x3072", "1024x1024", "2048x2048"],
    "cuda": ["512x512", "1024x1024", "2048x2048", "4096x4096", "4096x14336", "14336x4096", "8192x8192"],
}
BATCHED = {"cpu": ["64x64", "64x256", "128x128", "256x256", "512x512"], "cuda": ["256x256", "512x512", "1024x1024"]}
BATCH = 8
SIDES = (256, 512, 1024, 2048)
DEFAULT = ["256x256", "256x1024", "8x256x1024", "512x512", "512x2048", "1024x1024"]
PRESETS = {
    "jordan 5": steps_of("jordan", 5),
    "cubic 5": steps_of("cubic", 5),
    "you 5": steps_of("you", 5),
    "polar_express 5": steps_of("polar_express", 5),
    "from 0.01, 3": polar_express(3, 0.01),
    "from 0.01, 4": polar_express(4, 0.01),
}
ALL_PRESETS = PRESETS | {"cans 5": steps_of("cans", 5), "deepseek_v4 10": steps_of("deepseek_v4", 10)}
METHODS: tuple[NsMethod, ...] = ("plain", "gram")
_MOST_FOR_ERROR = 512
BANDS = {"fast": (0.65, 1.35), "(0.85, 1.15)": (0.85, 1.15), "(0.95, 1.05)": (0.95, 1.05)}


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
    texts = arguments.shapes or (all_shapes(device) if arguments.all else DEFAULT)
    ways = {dtype: ways_of(ALL_PRESETS if arguments.all else PRESETS, dtype) for dtype in dtypes}
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
    print_choices(found, ways, torch.device(device))
    if arguments.draw:
        draw(arguments.draw, found)


def all_shapes(device: str) -> list[str]:
    """256 to 2048, 1:1 and 1:4, alone and where it makes a difference in batches."""
    shapes = [(side, ratio * side) for side in SIDES for ratio in (1, 4)]
    alone = [f"{rows}x{cols}" for rows, cols in shapes]
    return [*alone, *(f"{BATCH}x{rows}x{cols}" for rows, cols in shapes if worth_batching(rows, cols, device))]


def ways_of(presets: Mapping[str, tuple[Quintic, ...]], dtype: torch.dtype) -> Ways:
    return {
        f"{name}, {method}": NewtonSchulz(steps, dtype, method) for name, steps in presets.items() for method in METHODS
    }


def print_choices(
    found: Mapping[tuple[torch.dtype, str], Mapping[str, Found]], ways: Mapping[torch.dtype, Ways], device: torch.device
) -> None:
    """What is chosen by FLOPs and by measured products, and its time beside the fastest that keeps the promise."""
    shapes = {text: parse_shape(text)[-2:] for _, text in found}
    costs = measure_costs(set(shapes.values()), device, dtypes=list(ways))
    titles = " | ".join(f"{each}: by FLOPs | by costs" for each in BANDS)
    print(f"\nTime of the choice, of the fastest:\n\n| shape | dtype | {titles} |")
    print(f"| --- | --- |{' --- | --- |' * len(BANDS)}")
    for (dtype, text), of_ways in found.items():
        cells: list[str] = []
        for allowed in BANDS.values():
            for known in (None, costs):
                options = NewtonSchulzOptions(allowed, "jordan", 5)
                choice = options.choice(*shapes[text], Arithmetic(device.type, dtype, known))
                cells.append(choice_cell(allowed, choice, of_ways, ways[dtype]))
        print(f"| {text} | {name_of(dtype)} | {' | '.join(cells)} |")


def print_rates(arguments: argparse.Namespace, device: str, dtypes: Sequence[torch.dtype]) -> None:
    """The tables of the default method, alone and in batches."""
    shapes = [text for text in arguments.shapes or SHAPES[device] if text.count("x") == 1]
    print("| shape | dtype | GFLOP/s | of torch's time | ceiling GFLOP/s | of the ceiling |")
    print("| --- | --- | --- | --- | --- | --- |")
    for dtype in dtypes:
        for shape in map(parse_shape, shapes):
            print(row(torch.randn(shape, device=device), dtype, arguments.seconds), flush=True)
    print(f"\n| shape | dtype | {BATCH} as a batch, of one after the other | worth_batching |")
    print("| --- | --- | --- | --- |")
    for dtype in dtypes:
        for shape in map(parse_shape, BATCHED[device]):
            print(batch_row(torch.randn(BATCH, *shape, device=device), dtype, arguments.seconds), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", metavar="[BATCHx]ROWSxCOLS")
    parser.add_argument("--all", action="store_true", help="256 to 2048, 1:1 and 1:4, one and 8, all coefficients")
    # Without units for bfloat16 it is a hundred times as slow, and nobody would take it.
    is_fast = torch.cuda.is_available() or cpu_multiplies_bfloat16_fast()
    default = ["bfloat16", "float32"] if is_fast else ["float32"]
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=default)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    parser.add_argument("--rates", action=argparse.BooleanOptionalAction, default=True, help="the first two tables")
    parser.add_argument("--draw", type=Path, help="an .svg or .png: error against time")
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
    rate = newton_schulz_flops(rows, cols, MuonConfig.ns_steps) / best["ours"]
    ceiling = 2 * short**3 / best["product"]
    return (
        f"| {rows} x {cols} | {name_of(dtype)} | {rate / 1e9:.0f} | {best['ours'] / best['torch']:.2f} | "
        f"{ceiling / 1e9:.0f} | {rate / ceiling:.2f} |"
    )


def batch_row(batch: Tensor, dtype: torch.dtype, seconds: float) -> str:
    best = fastest(
        {"batch": lambda: ours(batch, dtype), "single": lambda: [ours(matrix, dtype) for matrix in batch]}, seconds
    )
    rows, cols = batch.shape[1:]
    worth = worth_batching(rows, cols, batch.device.type)
    return f"| {rows} x {cols} | {name_of(dtype)} | {best['batch'] / best['single']:.2f} | {worth} |"


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
    flops, flops_of_torch = product_flops(rows, cols, symmetric=share), newton_schulz_flops(rows, cols, 5)
    # Of large matrices a part: their singular values would take longer than all else.
    part = members[0][: _MOST_FOR_ERROR * max(1, rows // cols), : _MOST_FOR_ERROR * max(1, cols // rows)]
    left, singular, right = torch.linalg.svd(part, full_matrices=False)
    is_large = singular >= 0.01 * part.norm()
    found: dict[str, Found] = {}
    for name, way in ways.items():
        update = way.orthogonalize(part, eps=MuonConfig.eps)
        values = (left.mT @ update.float() @ right.mT).diagonal()[is_large]
        error = (values - 1).abs().max().item()
        found[name] = Found(best[name], best[name] / best["torch"], way.cost(flops) / flops_of_torch, error)
    return found


def choice_cell(allowed: tuple[float, float], choice: NewtonSchulz, found: Mapping[str, Found], ways: Ways) -> str:
    """Time of the choice over that of the fastest of the ways that keep a band, and the names of both."""
    keeps = {name: band(way.steps, 0.01) for name, way in ways.items()}
    names = [name for name, (low, high) in keeps.items() if allowed[0] <= low and high <= allowed[1]]
    chosen = next((name for name in names if ways[name] == choice), None)
    if chosen is None:
        return f"- ({len(choice.steps)} steps, {choice.method}, not in the table)"
    best = min(names, key=lambda name: found[name].seconds)
    share = found[chosen].seconds / found[best].seconds
    return f"{share:.2f}: {chosen}" + ("" if best == chosen else f" (fastest: {best})")


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


def draw(path: Path, found: Mapping[tuple[torch.dtype, str], Mapping[str, Found]]) -> None:
    """One point for each method and shape: error of singular values against time; needs matplotlib."""
    # Without pyplot: no window, no global state.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(dtype for dtype, _ in found))
    figure = Figure(figsize=(6.2 * len(dtypes), 4.6), layout="constrained")
    for axes, dtype in zip(figure.subplots(1, len(dtypes), squeeze=False)[0], dtypes, strict=True):
        of_dtype = [of_ways for (its, _), of_ways in found.items() if its == dtype]
        presets = list(dict.fromkeys(name.rpartition(", ")[0] for name in of_dtype[0]))
        for index, preset in enumerate(presets):
            for method, marker in (("plain", "o"), ("gram", "x")):
                points = [of_ways[f"{preset}, {method}"] for of_ways in of_dtype]
                times, errors = [each.of_torch for each in points], [each.error for each in points]
                axes.scatter(times, errors, marker=marker, color=f"C{index}", s=28, label=f"{preset}, {method}")
        axes.set_yscale("log")
        axes.set(title=name_of(dtype), xlabel="time, of torch's", ylabel="largest error of a singular value")
        axes.axvline(1.0, color="0.8", linewidth=1, zorder=0)
        axes.legend(fontsize=7)
    with rc_context({"svg.hashsalt": "lightning-muon"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def ours(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return orthogonalize(
        matrix,
        steps=steps_of(MuonConfig.ns_coefficients, MuonConfig.ns_steps),
        eps=MuonConfig.eps,
        compute_dtype=dtype,
    )


def fastest(candidates: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Seconds of the fastest call of each, in turns; of the first one where a round takes longer than ``seconds``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    first = fastest_call(candidates, 0.0, device, least_rounds=1)
    return first if sum(first.values()) > seconds else fastest_call(candidates, seconds, device, least_rounds=1)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
