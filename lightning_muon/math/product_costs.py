"""What the products of Newton-Schulz cost: FLOPs, or seconds that were measured once and lie in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

# Of a matrix x with the short side s and the long side l: "gram" is x x^T; "square" is b A + c A A, and "symmetric" a
# product of two symmetric matrices, of s x s matrices; "whole" is such a matrix times x.
Product = Literal["gram", "square", "symmetric", "whole"]
ProductCost = Mapping[Product, float]
_PRODUCTS: tuple[Product, ...] = get_args(Product)


def product_flops(rows: int, cols: int, *, symmetric: float = 1.0) -> dict[Product, float]:
    """FLOPs of each product for a ``rows x cols`` matrix; those with a symmetric result count as a share of full ones.

    In the order in which they lie in :data:`Product`.
    """
    short, long = sorted((rows, cols))
    square, whole = 2.0 * short**3, 2.0 * short * short * long
    return {"gram": symmetric * whole, "square": symmetric * square, "symmetric": symmetric * square, "whole": whole}


@dataclass(frozen=True)
class Variant:
    """How products are computed."""

    dtype: torch.dtype
    by_kernel: bool = False  # Symmetric ones by the Triton kernel.

    @property
    def name(self) -> str:
        """Name of the product in files."""
        return str(self.dtype).removeprefix("torch.") + (" by kernel" if self.by_kernel else "")


@dataclass(frozen=True, eq=False)
class MeasuredCosts:
    """Seconds of each product, by shape and by the name of the variant.

    A choice by seconds that are measured when a run begins would differ from run to run, and with it the bits of the
    weights; those of a file are the same for all ranks and for each restart.
    """

    device_type: str  # Of the machine.
    device: str  # What people call it.
    seconds: Mapping[tuple[int, int], Mapping[str, ProductCost]] = field(repr=False)
    digest: str = ""  # Of the file; equal on ranks that have read the same numbers.

    def of(self, rows: int, cols: int, variant: Variant) -> ProductCost | None:
        """Seconds of each product for a matrix; ``None`` if they were not measured."""
        return self.seconds.get((rows, cols), {}).get(variant.name)

    def to_json(self) -> str:
        """Return what :func:`read_costs` reads."""
        by_shape = {f"{rows}x{cols}": found for (rows, cols), found in self.seconds.items()}
        return json.dumps({"device_type": self.device_type, "device": self.device, "seconds": by_shape}, indent=1)


@cache
def read_costs(path: str, device_type: str) -> MeasuredCosts:
    """The costs of a file of ``lightning-muon trace``, read once in a process.

    Raises a ``ValueError`` for a file that is none, or was measured on another type of device, or with a Triton that is
    not installed.
    """
    advice = "make one with lightning-muon trace, or leave out ns_costs"
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text)
        seconds = {_shape(name): _checked(found) for name, found in content["seconds"].items()}
        found = MeasuredCosts(
            str(content["device_type"]), str(content["device"]), seconds, hashlib.sha256(text.encode()).hexdigest()[:16]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"ns_costs={path!r} cannot be read ({type(error).__name__}: {error}); {advice}") from error
    if found.device_type != device_type:
        raise ValueError(
            f"ns_costs={path!r} was measured on {found.device_type} ({found.device}), and Newton-Schulz runs on "
            f"{device_type}; {advice}"
        )
    uses_kernel = any(name.endswith("kernel") for variants in seconds.values() for name in variants)
    if uses_kernel and find_spec("triton") is None:
        raise ValueError(f"ns_costs={path!r} was measured with triton, which is not installed; install it, or {advice}")
    return found


def _shape(name: str) -> tuple[int, int]:
    rows, cols = map(int, name.split("x"))
    return rows, cols


def _checked(variants: Any) -> dict[str, ProductCost]:
    found = {str(name): {each: float(costs[each]) for each in _PRODUCTS} for name, costs in variants.items()}
    if not all(cost > 0 for costs in found.values() for cost in costs.values()):
        raise ValueError("a product takes no time")
    return cast("dict[str, ProductCost]", found)
