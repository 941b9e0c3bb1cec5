"""Views of blocks: each element in its place, padding in none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, Full, Replicator
from lightning_muon.flexdemo.bucket import paired_views
from lightning_muon.flexdemo.bucket_plan import Part, Place
from tests.unit.flexdemo.cases import SHAPES, plans_for, short_name

SQUARES = DCTTopK(chunk_size=8, top_k=5)


def _places(shapes: list[tuple[int, ...]], replicator: Replicator) -> list[tuple[Part, Place, Tensor]]:
    tensors = [torch.randn(shape) for shape in shapes]
    (plan,) = plans_for(tensors, replicator, dense_below=0)
    return [(part, place, tensors[place.number]) for part in plan.parts for place in part.places]


def _expected_batch(part: Part, place: Place, local: Tensor) -> Tensor:
    """The blocks, element by element; zeros where there is nothing of ``local``."""
    batch = torch.zeros(part.batch_shape)
    matrix = local.reshape(place.rows, place.cols).tolist()
    for row in range(place.rows):
        for col in range(place.cols):
            if len(part.block_shape) == 2:
                height, width = part.block_shape
                across = (place.cols + width - 1) // width
                block = place.first + (row // height) * across + col // width
                batch[block, row % height, col % width] = matrix[row][col]
            else:
                index = row * place.cols + col + place.first * (part.block_numel if part.block_shape else 1)
                batch[index // part.block_numel, index % part.block_numel] = matrix[row][col]
    return batch


@pytest.mark.parametrize("replicator", [SQUARES, DCTTopK(chunk_size=10, strips=True), Full()], ids=short_name)
def test_every_element_has_its_place_and_padding_stays_untouched(replicator: Replicator) -> None:
    torch.manual_seed(0)
    for part, place, local in _places(SHAPES, replicator):
        batch = torch.zeros(part.batch_shape)
        for into, source in paired_views(part, place, batch, local):
            into.copy_(source)
        assert torch.equal(batch, _expected_batch(part, place, local))


@pytest.mark.parametrize("replicator", [SQUARES, DCTTopK(chunk_size=10, strips=True), Full()], ids=short_name)
def test_the_way_back_reaches_every_element_once(replicator: Replicator) -> None:
    torch.manual_seed(1)
    for part, place, local in _places(SHAPES, replicator):
        batch, found = _expected_batch(part, place, local), torch.zeros_like(local)
        for source, into in paired_views(part, place, batch, found):
            into.add_(source)
        assert torch.equal(found, local)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 23])
@pytest.mark.parametrize("cols", [1, 7, 8, 9, 16, 23])
def test_blocks_at_the_edges_are_cut(rows: int, cols: int) -> None:
    torch.manual_seed(2)
    ((part, place, local),) = _places([(rows, cols)], SQUARES)
    batch = torch.full(part.batch_shape, float("nan"))
    for into, source in paired_views(part, place, batch, local):
        into.copy_(source)
    filled = ~batch.isnan()
    assert filled.sum() == local.numel()
    assert torch.equal(batch.nan_to_num(0.0), _expected_batch(part, place, local))


def test_views_share_the_memory_of_what_they_view() -> None:
    ((part, place, local),) = _places([(13, 11)], SQUARES)
    batch = torch.zeros(part.batch_shape)
    for in_batch, in_local in paired_views(part, place, batch, local):
        in_batch.fill_(1)
        in_local.fill_(2)
    assert (local == 2).all()
    assert batch.sum() == local.numel()
