"""Boxes: the shards of every rank against torch.chunk, and parts that make up a whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Shard

from lightning_muon.params.layout import Box, held_boxes, tile


def test_parts_tile_a_box_only_without_gap_and_overlap() -> None:
    box = Box((0, 0), (4, 6))
    rows = [Box((0, 0), (3, 6)), Box((3, 0), (4, 6)), Box((4, 0), (4, 6))]
    assert tile(rows, box)
    assert tile([Box((r, c), (r + 2, c + 3)) for r in (0, 2) for c in (0, 3)], box)
    assert not tile(rows[:1], box)
    # A gap as large as an overlap: the sizes alone add up.
    assert not tile([Box((0, 0), (2, 6)), Box((1, 0), (3, 6))], box)
    assert not tile([Box((0, 0), (2, 3)), Box((0, 3), (2, 6)), Box((2, 0), (4, 3)), Box((1, 3), (3, 6))], box)


@pytest.mark.parametrize("shape", [(13, 7), (3, 200), (1, 9), (5, 4, 3)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_are_the_chunks_of_torch(shape: tuple[int, ...], dim: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for num_ranks in range(1, 5):
        boxes = held_boxes(shape, (num_ranks,), [Shard(dim)], [(rank,) for rank in range(num_ranks)])
        chunks = tensor.chunk(num_ranks, dim)
        for box, chunk in itertools.zip_longest(boxes, chunks):
            found = tensor[tuple(map(slice, box.start, box.stop))]
            assert torch.equal(found, chunk) if chunk is not None else box.numel == 0
        assert sum(box.numel for box in boxes) == tensor.numel()
