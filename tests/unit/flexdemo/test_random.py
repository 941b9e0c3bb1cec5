"""Elements drawn at random."""

from __future__ import annotations

import pytest
import torch

from lightning_muon.flexdemo.replicator import Components, Turn
from lightning_muon.flexdemo.replicators import Random


def drawn(replicator: Random, numel: int, turn: Turn) -> list[int]:
    """Which elements are sent: the values of a block that counts."""
    values, positions = replicator.encode(torch.arange(numel, dtype=torch.float32)[None], turn)
    assert positions is None
    return [int(value) for value in values[0].tolist()]


@pytest.mark.parametrize("numel", [1, 9, 10, 13, 127, 1000])
def test_there_is_one_element_of_each_cell(numel: int) -> None:
    replicator = Random(rate=0.1)
    for step in range(50):
        elements = drawn(replicator, numel, Turn(step, 0))
        assert len(elements) == replicator.num_sent(numel)
        assert [element // 10 for element in elements] == list(range(len(elements)))


def test_every_element_comes_equally_often() -> None:
    replicator, counts = Random(rate=0.125, seed=5), torch.zeros(29)
    for step in range(4000):
        counts[drawn(replicator, 29, Turn(step, 0))] += 1
    # Binomial with p = 1 / 8 (standard deviation 21), in the short last cell p = 1 / 5 (25); six deviations.
    assert (counts[:24] - 500).abs().max() < 6 * 21
    assert (counts[24:] - 800).abs().max() < 6 * 25


def test_nodes_agree_and_turns_parts_and_seeds_differ() -> None:
    here = drawn(Random(rate=0.1, seed=3), 1000, Turn(7, 2))
    assert drawn(Random(rate=0.1, seed=3), 1000, Turn(7, 2)) == here
    others = [(3, Turn(8, 2)), (3, Turn(7, 3)), (4, Turn(7, 2))]
    assert all(drawn(Random(rate=0.1, seed=seed), 1000, turn) != here for seed, turn in others)


def test_decoding_puts_values_where_they_came_from() -> None:
    replicator, turn = Random(rate=1 / 3), Turn(2, 1)
    blocks = torch.randn(1, 127)
    components = replicator.encode(blocks, turn)
    elements = drawn(replicator, 127, turn)
    expected = torch.zeros(1, 127)
    expected[0, elements] = blocks[0, elements]
    assert torch.equal(replicator.decode(components, (127,), turn), expected)
    doubled = Components(components.values * 2, None)
    assert torch.equal(replicator.decode(doubled, (127,), turn), 2 * expected)


def test_the_default_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    Random(rate=0.5).encode(torch.randn(1, 10, generator=torch.Generator()), Turn(0, 0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_a_rate_that_is_no_part_of_the_elements_is_an_error(rate: float) -> None:
    with pytest.raises(ValueError, match=r"Random: rate must be in \(0, 1\]"):
        Random(rate=rate)
