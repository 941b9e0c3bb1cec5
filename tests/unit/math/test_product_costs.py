"""Choices by seconds that were measured once, and the file in which these lie."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_muon.math import product_costs
from lightning_muon.math.coefficients import polar_express
from lightning_muon.math.methods import Arithmetic, NewtonSchulz, NewtonSchulzOptions
from lightning_muon.math.product_costs import MeasuredCosts, Product, Variant, read_costs

FAST = NewtonSchulzOptions("fast", (3.4445, -4.7750, 2.0315), 5)
THREE = polar_express(3, 0.01)
_SQUARE = (64, 64)


def _costs(**seconds: tuple[float, float, float, float]) -> MeasuredCosts:
    """Of square matrices: gram, square, symmetric, whole by the name of the variant, blanks as underscores."""
    names: tuple[Product, ...] = ("gram", "square", "symmetric", "whole")
    found = {
        variant.replace("_", " "): {name: float(value) for name, value in zip(names, values, strict=True)}
        for variant, values in seconds.items()
    }
    return MeasuredCosts("cpu", "this", {_SQUARE: found})


@pytest.mark.parametrize(
    ("costs", "others", "expected"),
    [
        # 3 x (gram + square + whole), all alike: as by FLOPs.
        (_costs(float32=(1, 1, 1, 1)), (), NewtonSchulz(THREE, torch.float32)),
        # Products with the matrix take long: once each, on the Gram matrix.
        (_costs(float32=(9, 1, 1, 9)), (), NewtonSchulz(THREE, torch.float32, "gram")),
        # On the Gram matrix 8.54 against 9 seconds, which is not clearly fewer: the one with fewer FLOPs.
        (_costs(float32=(1, 1, 0.59, 1)), (), NewtonSchulz(THREE, torch.float32)),
        (_costs(float32=(1, 1, 1, 1), float32_by_kernel=(0.5, 0.5, 0.5, 1)), (), (torch.float32, True)),
        # Other dtypes are taken where compute_dtype leaves the choice.
        (_costs(float32=(2, 2, 2, 2), bfloat16=(1, 1, 1, 1)), (torch.bfloat16,), (torch.bfloat16, False)),
        (_costs(float32=(2, 2, 2, 2), bfloat16=(1, 1, 1, 1)), (), (torch.float32, False)),
        (_costs(float32=(1.05, 1.05, 1.05, 1.05), bfloat16=(1, 1, 1, 1)), (torch.bfloat16,), (torch.float32, False)),
        # Nothing to compare with.
        (_costs(bfloat16=(1, 1, 1, 1)), (torch.bfloat16,), (torch.float32, False)),
    ],
)
def test_clearly_fewer_seconds_win(costs: MeasuredCosts, others: tuple[torch.dtype, ...], expected: Any) -> None:
    arithmetic = Arithmetic("cpu", torch.float32, costs, others)
    found = FAST.choice(*_SQUARE, arithmetic)
    assert (expected if isinstance(expected, NewtonSchulz) else (found.dtype, found.by_kernel)) == (
        found if isinstance(expected, NewtonSchulz) else expected
    )
    # A shape that was not measured, and the bits of torch.optim.Muon.
    assert FAST.choice(65, 64, arithmetic) == FAST.choice(65, 64, Arithmetic("cpu", torch.float32))
    jordan = NewtonSchulz(((3.4445, -4.7750, 2.0315),) * 5, torch.float32)
    assert NewtonSchulzOptions("reference", (3.4445, -4.7750, 2.0315), 5).choice(*_SQUARE, arithmetic) == jordan


def test_nothing_is_timed_when_a_choice_is_made() -> None:
    arithmetic = Arithmetic("cpu", torch.float32, _costs(float32=(1, 1, 1, 1)))
    with (
        mock.patch("time.perf_counter", side_effect=AssertionError),
        mock.patch("torch.mm", side_effect=AssertionError),
    ):
        for quality in ("reference", "fast"):
            NewtonSchulzOptions(quality, "jordan", 5).choice(*_SQUARE, arithmetic)


def test_a_file_keeps_what_was_measured(tmp_path: Path) -> None:
    costs, path = _costs(bfloat16=(1, 2, 3, 4)), tmp_path / "costs.json"
    path.write_text(costs.to_json())
    found = read_costs(str(path), "cpu")
    assert (found.seconds, found.device) == (costs.seconds, "this")
    assert found.of(*_SQUARE, Variant(torch.bfloat16)) == {"gram": 1, "square": 2, "symmetric": 3, "whole": 4}
    assert (
        found.of(*_SQUARE, Variant(torch.bfloat16, by_kernel=True)) is found.of(1, 2, Variant(torch.bfloat16)) is None
    )
    # In messages that compare ranks: which file it is, and not all numbers.
    assert found.digest in str(found) and "gram" not in str(found)
    path.write_text(_costs(bfloat16=(1, 2, 3, 5)).to_json())
    assert read_costs(str(path), "cpu") is found, "what a run chooses by changes in the middle of it"
    read_costs.cache_clear()
    assert read_costs(str(path), "cpu").digest != found.digest


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        (json.dumps({"device_type": "cpu", "device": "", "seconds": {"8": {}}}), "ValueError"),
        (json.dumps({"device_type": "cpu", "device": "", "seconds": {"8x8": {"float32": {"gram": 1.0}}}}), "'square'"),
        (_costs(float32=(1, 0, 1, 1)).to_json(), "takes no time"),
        (_costs(float32=(1, 1, 1, 1)).to_json().replace('"cpu"', '"cuda"'), "measured on cuda"),
        (_costs(float32_by_kernel=(1, 1, 1, 1)).to_json(), "triton"),
    ],
)
def test_a_wrong_file_is_an_error_that_helps(text: str | None, part: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    with (
        mock.patch.object(product_costs, "find_spec", return_value=None),
        pytest.raises(ValueError, match=f"(?s)costs.json.*{part}.*lightning-muon trace"),
    ):
        read_costs(str(path), "cpu")
