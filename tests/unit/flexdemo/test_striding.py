"""Every n-th element."""

from __future__ import annotations

import torch

from lightning_muon.flexdemo.replicator import Turn
from lightning_muon.flexdemo.replicators import Striding


def test_the_elements_of_a_turn() -> None:
    blocks = torch.arange(1.0, 12.0)[None]
    sent = [Striding(rate=0.25).encode(blocks, Turn(step, 5)).values[0].tolist() for step in range(4, 8)]
    assert sent == [[1, 5, 9], [2, 6, 10], [3, 7, 11], [4, 8, 0]]
