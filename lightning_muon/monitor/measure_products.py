"""Measures the time of the products of Newton-Schulz on this machine, for ``ns_costs``."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

from lightning_muon.math.newton_schulz import worth_batching
from lightning_muon.math.product_costs import MeasuredCosts, Product, ProductCost, Variant
from lightning_muon.math.symmetric import add_square, addmm, gram_matrix, halves_of, symmetric_product
from lightning_muon.optim.planned_optimizer import resolve_compute_dtype
from lightning_muon.params.logical import logical_matrices
from lightning_muon.schedule.shapes import ModelShapes

_Name = TypeVar("_Name", bound=str)
_BATCH = 8
_LEAST_ROUNDS = 5  # The first one loads libraries and touches memory.


def model_matrices(model: ModelShapes) -> list[tuple[int, int]]:
    """The different ``(rows, cols)`` of the trainable matrices of a model."""
    trained = [each for each in model.parameters if each.kind != "elementwise" and not each.frozen]
    found = {(each.rows, each.cols) for parameter in trained for each in logical_matrices(parameter.shape, parameter)}
    return sorted(found)


def measure_costs(
    shapes: Iterable[tuple[int, int]], device: torch.device, *, seconds: float = 0.3, dtypes: Sequence[torch.dtype] = ()
) -> MeasuredCosts:
    """Measure the seconds of each product for these shapes, each shape and variant for about ``seconds``; local.

    The products are called in turns, and the fastest call of each counts: other work on the machine only adds. Matrices
    that the optimizer orthogonalizes in batches are measured in batches. ``dtypes`` are by default those that
    ``compute_dtype="auto"`` chooses from, and on CUDA float16.
    """
    # Without units for bfloat16, a CPU takes a hundred times as long for it.
    known = dtypes or tuple(dict.fromkeys((resolve_compute_dtype("auto", device), torch.float32)))
    if device.type == "cuda":
        known = dtypes or (*known, torch.float16)
    kernels = (False, True) if device.type == "cuda" and find_spec("triton") is not None else (False,)
    variants = [Variant(dtype, by_kernel) for dtype, by_kernel in product(known, kernels)]
    found = {
        (rows, cols): {variant.name: _of_shape(rows, cols, variant, device, seconds) for variant in variants}
        for rows, cols in shapes
    }
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return MeasuredCosts(device.type, name, found)


def _of_shape(rows: int, cols: int, variant: Variant, device: torch.device, seconds: float) -> ProductCost:
    number = _BATCH if worth_batching(rows, cols, device.type) else 1
    short, long = sorted((rows, cols))
    x = torch.randn((number, short, long) if number > 1 else (short, long), device=device)
    # A small norm, so that no product overflows in float16.
    x = x.div_(x.norm()).to(variant.dtype)
    best = fastest(dict(_products(x, by_kernel=variant.by_kernel)), seconds, device, least_rounds=_LEAST_ROUNDS)
    return {name: best[name] / number for name in best}


def _products(x: Tensor, *, by_kernel: bool) -> Iterator[tuple[Product, Callable[[], object]]]:
    """The products as Newton-Schulz computes them, in :mod:`lightning_muon.math.newton_schulz`."""
    halves = halves_of(x, by_kernel=by_kernel)
    gram = x.new_empty((*x.shape[:-1], x.size(-2)))
    square, other, following = torch.empty_like(gram), torch.empty_like(gram), torch.empty_like(x)
    gram_matrix(x, halves, out=gram)
    add_square(gram, -1.0, 1.0, halves, out=square)
    yield "gram", partial(gram_matrix, x, halves, out=other)
    yield "square", partial(add_square, gram, -1.0, 1.0, halves, out=other)
    yield "symmetric", partial(symmetric_product, square, gram, halves, out=other)
    yield "whole", partial(addmm, x, square, x, beta=1.0, alpha=1.0, out=following)


def fastest(
    candidates: Mapping[_Name, Callable[[], object]], seconds: float, device: torch.device, *, least_rounds: int = 1
) -> dict[_Name, float]:
    """Seconds of the fastest call of each candidate; they are called in turns until ``seconds`` are over."""
    best = dict.fromkeys(candidates, float("inf"))
    deadline, number = time.perf_counter() + seconds, 0
    while number < least_rounds or time.perf_counter() < deadline:
        for name, run in candidates.items():
            _synchronize(device)
            started = time.perf_counter()
            run()
            _synchronize(device)
            best[name] = min(best[name], time.perf_counter() - started)
        number += 1
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
