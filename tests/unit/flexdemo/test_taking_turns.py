"""Replicators that send each element once in a period."""

from __future__ import annotations

import pytest
import torch

from lightning_muon.flexdemo.replicator import Components, Turn
from lightning_muon.flexdemo.replicators import Slicing, Striding, TakingTurns

BOTH = pytest.mark.parametrize("kind", [Slicing, Striding])


@BOTH
@pytest.mark.parametrize("numel", [1, 3, 13, 127, 128])
@pytest.mark.parametrize(("rate", "period"), [(1.0, 1), (0.25, 4), (0.1, 10), (1 / 3, 3)])
def test_over_one_period_every_element_is_sent_exactly_once(
    kind: type[TakingTurns], numel: int, rate: float, period: int
) -> None:
    replicator, first = kind(rate=rate), 17
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


@BOTH
def test_what_a_message_holds_behind_the_last_element_is_not_applied(kind: type[TakingTurns]) -> None:
    replicator, turn = kind(rate=0.25), Turn(0 if kind is Slicing else 3, 0)
    decoded = replicator.decode(Components(torch.tensor([[4.0, 8.0, 99.0]]), None), (11,), turn)
    assert sorted(decoded[0].tolist()) == [0.0] * 9 + [4.0, 8.0]


@BOTH
def test_blocks_of_several_dimensions_are_flattened(kind: type[TakingTurns]) -> None:
    replicator, turn, blocks = kind(rate=0.5), Turn(1, 0), torch.randn(3, 5, 7)
    flat = replicator.decode(replicator.encode(blocks.view(3, 35), turn), (35,), turn)
    assert torch.equal(replicator.decode(replicator.encode(blocks, turn), (5, 7), turn), flat.view(3, 5, 7))


@BOTH
@pytest.mark.parametrize("rate", [0, -1.0, 1.01])
def test_a_rate_that_is_no_part_of_the_elements_is_an_error(kind: type[TakingTurns], rate: float) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}: rate must be in \(0, 1\]"):
        kind(rate=rate)
