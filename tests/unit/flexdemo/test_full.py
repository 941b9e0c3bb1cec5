"""Everything is sent."""

from __future__ import annotations

import torch

from lightning_muon.flexdemo.replicator import Turn
from lightning_muon.flexdemo.replicators import Full


def test_every_element_is_sent_in_its_order() -> None:
    blocks, turn = torch.randn(1, 127), Turn(0, 0)
    components = Full().encode(blocks, turn)
    assert components.positions is None
    assert torch.equal(components.values, blocks) and Full().num_sent(127) == 127
    assert torch.equal(Full().decode(components, (127,), turn), blocks)


def test_blocks_of_several_dimensions_come_back_in_their_shape() -> None:
    blocks, turn = torch.randn(3, 13, 7), Turn(0, 0)
    assert torch.equal(Full().decode(Full().encode(blocks, turn), (13, 7), turn), blocks)


def test_what_is_sent_does_not_change_with_the_blocks() -> None:
    blocks = torch.ones(1, 13)
    components = Full().encode(blocks, Turn(0, 0))
    blocks.zero_()
    assert torch.equal(components.values, torch.ones(1, 13))
