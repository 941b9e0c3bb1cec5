"""The interface, by a replicator that a user might write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from lightning_muon.flexdemo.replicator import Components, Replicator, Turn
from tests.unit.flexdemo.cases import bits_per_parameter


@dataclass(frozen=True)
class FirstElements(Replicator):
    count: int = 3
    sends_positions: ClassVar[bool] = False

    def num_sent(self, block_numel: int) -> int:
        return min(self.count, block_numel)

    def encode(self, blocks: Tensor, turn: Turn) -> Components:
        return Components(blocks.flatten(1)[:, : self.count], None)

    def decode(self, components: Components, block_shape: tuple[int, ...], turn: Turn) -> Tensor:
        blocks = components.values.new_zeros((components.values.size(0), *block_shape))
        blocks.flatten(1)[:, : self.count] = components.values
        return blocks


def test_three_methods_make_a_replicator() -> None:
    replicator, turn = FirstElements(), Turn(0, 0)
    assert replicator.block_shape(13, 7) == ()
    assert bits_per_parameter(replicator, "bf16", 13, 7) == 8 * 6 / 91
    assert replicator.decode(replicator.encode(torch.ones(1, 5), turn), (5,), turn).tolist() == [[1, 1, 1, 0, 0]]


def test_a_replicator_without_its_methods_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Replicator()
