"""A slice that moves on."""

from __future__ import annotations

import pytest
import torch

from lightning_muon.replicators.replicator import Components, Turn
from lightning_muon.replicators.slicing import Slicing


@pytest.mark.parametrize("numel", [1, 3, 13, 127, 128])
@pytest.mark.parametrize(("rate", "period"), [(1.0, 1), (0.25, 4), (0.1, 10), (0.3, 3)])
def test_over_one_period_every_element_is_sent_exactly_once(numel: int, rate: float, period: int) -> None:
    replicator, first = Slicing(rate=rate), 17
    # No zeros, which would hide what is sent twice.
    blocks = torch.rand(1, numel) + 1
    total, times = torch.zeros(1, numel), torch.zeros(1, numel)
    for step in range(first, first + period):
        components = replicator.encode(blocks, Turn(step, 0))
        assert components.positions is None
        assert components.values.shape == (1, replicator.num_sent(numel))
        decoded = replicator.decode(components, (numel,), Turn(step, 0))
        total += decoded
        times += decoded != 0
    assert torch.equal(times, torch.ones(1, numel))
    assert torch.equal(total, blocks)


def test_the_elements_of_a_turn() -> None:
    blocks = torch.arange(1.0, 12.0)[None]
    sent = [Slicing(rate=0.25).encode(blocks, Turn(step, 5)).values[0].tolist() for step in range(4, 8)]
    assert sent == [[1, 2, 0], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_what_a_message_holds_behind_the_last_element_is_not_applied() -> None:
    replicator, turn = Slicing(rate=0.25), Turn(0, 0)
    decoded = replicator.decode(Components(torch.tensor([[4.0, 8.0, 99.0]]), None), (11,), turn)
    assert sorted(decoded[0].tolist()) == [0.0] * 9 + [4.0, 8.0]


def test_blocks_of_several_dimensions_are_flattened() -> None:
    replicator, turn, blocks = Slicing(rate=0.5), Turn(1, 0), torch.randn(3, 5, 7)
    flat = replicator.decode(replicator.encode(blocks.view(3, 35), turn), (35,), turn)
    assert torch.equal(replicator.decode(replicator.encode(blocks, turn), (5, 7), turn), flat.view(3, 5, 7))


@pytest.mark.parametrize("rate", [0, -1.0, 1.01])
def test_a_rate_that_is_no_part_of_the_elements_is_an_error(rate: float) -> None:
    with pytest.raises(ValueError, match=r"Slicing: rate must be in \(0, 1\]"):
        Slicing(rate=rate)
