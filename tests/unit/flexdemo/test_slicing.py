"""A slice that moves on."""

from __future__ import annotations

import torch

from lightning_muon.flexdemo.replicator import Turn
from lightning_muon.flexdemo.replicators import Slicing


def test_the_elements_of_a_turn() -> None:
    blocks = torch.arange(1.0, 12.0)[None]
    sent = [Slicing(rate=0.25).encode(blocks, Turn(step, 5)).values[0].tolist() for step in range(4, 8)]
    assert sent == [[1, 2, 0], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
