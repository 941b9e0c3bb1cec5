"""The largest cosine coefficients against a sort of all."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_muon.flexdemo.replicator import Components, Turn
from lightning_muon.flexdemo.replicators import DCTTopK, largest
from lightning_muon.math.dct import dct, inverse_dct

TURN = Turn(step=3, part=1)


@pytest.mark.parametrize("shape", [(13,), (127,), (13, 7), (64, 64), (1, 1), (2, 127)], ids=str)
def test_with_all_coefficients_what_is_decoded_is_what_was_encoded(shape: tuple[int, ...]) -> None:
    torch.manual_seed(sum(shape))
    replicator = DCTTopK(chunk_size=127, top_k=1 << 20)
    blocks = torch.randn(34, *shape)
    before = blocks.clone()
    components = replicator.encode(blocks, TURN)
    assert components.values.shape == (34, math.prod(shape))
    assert torch.equal(blocks, before)
    assert torch.allclose(replicator.decode(components, shape, TURN), blocks, atol=2e-5)


@pytest.mark.parametrize("shape", [(64,), (13, 7), (64, 64), (64, 13)], ids=str)
@pytest.mark.parametrize("top_k", [1, 8, 32])
def test_what_is_left_are_the_smaller_coefficients(shape: tuple[int, ...], top_k: int) -> None:
    torch.manual_seed(top_k)
    replicator = DCTTopK(top_k=top_k)
    blocks = torch.randn(35, *shape)
    components = replicator.encode(blocks, TURN)
    assert components.positions is not None
    assert components.values.shape == components.positions.shape == (35, top_k)
    coefficients = dct(blocks).flatten(1)
    order = coefficients.abs().sort(1, descending=True).indices
    kept = torch.zeros_like(coefficients).scatter_(1, order[:, :top_k], coefficients.gather(1, order[:, :top_k]))
    decoded = replicator.decode(components, shape, TURN)
    # Other orders of summation in float32.
    assert torch.allclose(decoded, inverse_dct(kept.view_as(blocks)), atol=2e-5)
    # The transform is orthonormal: the energy that is left is that of the coefficients that are left.
    left = (blocks - decoded).square().sum().double()
    assert torch.isclose(left, (coefficients - kept).square().sum().double(), rtol=1e-4)


@pytest.mark.parametrize("numel", [1, 13, 127, 832, 4096])
@pytest.mark.parametrize("count", [1, 5, 32, 127])
def test_the_largest_are_those_of_a_full_sort(numel: int, count: int) -> None:
    torch.manual_seed(numel + count)
    count = min(count, numel)
    # Few different numbers: many ties.
    for rows in (torch.randn(6, numel), torch.randint(-3, 4, (6, numel)).float(), torch.zeros(6, numel)):
        found = largest(rows, count)
        assert all(len(set(row)) == count for row in found.tolist())
        magnitudes = rows.abs().gather(1, found).sort(1, descending=True).values
        assert torch.equal(magnitudes, rows.abs().sort(1, descending=True).values[:, :count])
        assert torch.equal(found, largest(rows.clone(), count))


def test_a_row_has_the_same_largest_whatever_other_rows_there_are() -> None:
    rows = torch.randint(-3, 4, (9, 512)).float()
    assert torch.equal(largest(rows, 8)[4:6], largest(rows[4:6], 8))


def test_values_of_several_nodes_at_one_position_add_up() -> None:
    replicator = DCTTopK(chunk_size=8, top_k=3)
    twice = Components(torch.tensor([[1.5, -2.0, 0.5]]), torch.tensor([[7, 20, 7]]))
    once = Components(torch.tensor([[2.0, -2.0]]), torch.tensor([[7, 20]]))
    decoded = replicator.decode(twice, (8, 8), TURN)
    assert torch.allclose(decoded, replicator.decode(once, (8, 8), TURN), atol=1e-6)
    assert decoded.abs().max() > 0.1


def test_blocks_are_no_longer_than_the_matrix() -> None:
    replicator = DCTTopK(chunk_size=64, top_k=32)
    assert replicator.block_shape(640, 13) == (64, 13)
    assert replicator.block_shape(1, 127) == (1, 64)
    assert DCTTopK(chunk_size=64, strips=True).block_shape(640, 13) == (64,)
    assert replicator.num_sent(13) == 13 and replicator.num_sent(4096) == 32


@pytest.mark.parametrize("options", [{"chunk_size": 0}, {"top_k": 0}, {"top_k": -3}])
def test_sizes_below_one_are_errors(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"DCTTopK: {next(iter(options))} must be at least 1"):
        DCTTopK(**options)
