"""Checks of options."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from lightning_muon import Components, DCTTopK, Full, Random, Replicator, Slicing, Striding, Turn
from lightning_muon.flexdemo.replicator import check_replicator, period, require_count, require_rate


@pytest.mark.parametrize(("rate", "expected"), [(1.0, 1), (0.5, 2), (1 / 3, 3), (1 / 128, 128)])
def test_the_period_is_the_inverse_of_the_rate(rate: float, expected: int) -> None:
    assert period(rate) == expected


def test_errors_name_the_class_the_option_and_the_value() -> None:
    with pytest.raises(ValueError, match="SimpleNamespace: size must be at least 1, got 0"):
        require_count(SimpleNamespace(size=0), "size")
    with pytest.raises(TypeError, match="SimpleNamespace: size must be an int, got '3'"):
        require_count(SimpleNamespace(size="3"), "size")
    with pytest.raises(TypeError, match=r"rate must be a number, got '0\.5'"):
        require_rate(SimpleNamespace(rate="0.5"))
    require_count(SimpleNamespace(size=1), "size")
    require_rate(SimpleNamespace(rate=1))


def test_a_rate_that_would_be_rounded_is_an_error_with_its_neighbours() -> None:
    with pytest.raises(ValueError, match=r"got 0\.7, use 1/2 = 0\.5 or 1/1 = 1"):
        require_rate(SimpleNamespace(rate=0.7))
    for rate in (0.33, 0.143, 0.1):  # decimals of 1/3, 1/7 and 1/10
        require_rate(SimpleNamespace(rate=rate))


@pytest.mark.parametrize(
    "replicator", [DCTTopK(), DCTTopK(strips=True), Random(0.1), Striding(0.25), Slicing(0.5), Full()]
)
def test_the_replicators_that_come_with_the_package_keep_the_rules(replicator: Replicator) -> None:
    check_replicator(replicator)


@dataclass(frozen=True)
class _Largest(Replicator):
    """The two largest elements of each strip of 8, with one mistake."""

    mistake: str = ""
    sends_positions: ClassVar[bool] = True

    def block_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        return (8,)

    def num_sent(self, block_numel: int) -> int:
        return {"count": 3, "nothing": 0}.get(self.mistake, 2)

    def encode(self, blocks: Tensor, turn: Turn) -> Components:
        if self.mistake == "in place":
            blocks.abs_()
        positions = blocks.abs().topk(2, dim=1).indices
        values = blocks.gather(1, positions)
        if self.mistake == "twice":
            positions, values = positions[:, :1].expand(-1, 2), 0.5 * values[:, :1].expand(-1, 2)
        if self.mistake == "random":
            values = values * torch.rand(())
        if self.mistake == "shifted":
            positions = (positions + 1) % 8
        return Components(values, None if self.mistake == "positions" else positions)

    def decode(self, components: Components, block_shape: tuple[int, ...], turn: Turn) -> Tensor:
        values = components.values.square() if self.mistake == "nonlinear" else components.values
        blocks = torch.zeros(len(values), *block_shape)
        if self.mistake == "scatter":
            return blocks.scatter_(1, components.positions, values)
        return blocks.scatter_add_(1, components.positions, values)

    def subtract_(self, blocks: Tensor, components: Components, turn: Turn) -> None:
        super().subtract_(blocks, components, turn)
        if self.mistake == "subtract":
            blocks.zero_()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("in place", "encode changes the blocks"),
        ("count", r"num_sent\(8\) says"),
        ("random", "other values when it is called again"),
        ("positions", "sends_positions is True, but encode gives positions None"),
        ("nonlinear", "not linear"),
        ("scatter", "does not add up values at the same position"),
        ("twice", "a position occurs twice in a block"),
        ("nothing", r"num_sent\(8\) is 0: blocks of shape \(8,\) would never be trained"),
        ("shifted", "no part of the blocks, which grow when it is taken off"),
        ("subtract", "subtract_ takes off something else than decode gives"),
    ],
)
def test_a_replicator_that_would_change_the_training_in_silence_is_an_error(mistake: str, message: str) -> None:
    check_replicator(_Largest())
    with pytest.raises(ValueError, match=f"_Largest.*{message}"):
        check_replicator(_Largest(mistake))
