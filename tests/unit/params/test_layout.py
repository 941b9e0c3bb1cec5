"""Boxes of every rank, against torch.chunk."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from lightning_muon.params.layout import held_boxes, sharded_axes


@pytest.mark.parametrize("shape", [(13, 7), (3, 200), (1, 9), (5, 4, 3)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_shards_are_the_chunks_of_torch_and_empty_ones_are_empty(
    shape: tuple[int, ...], dim: int, num_ranks: int
) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    boxes = held_boxes(shape, (num_ranks,), [Shard(dim)], [(rank,) for rank in range(num_ranks)])
    chunks = tensor.chunk(num_ranks, dim)
    for rank, box in enumerate(boxes):
        index = tuple(map(slice, box.start, box.stop))
        if rank < len(chunks):
            assert torch.equal(tensor[index], chunks[rank])
        else:
            assert box.numel == 0
    assert sum(box.numel for box in boxes) == tensor.numel()


def test_replicas_hold_the_same_box_on_a_2d_mesh() -> None:
    boxes = held_boxes((6, 4), (2, 2), [Replicate(), Shard(0)], [(0, 0), (0, 1), (1, 0), (1, 1)])
    assert boxes[0] == boxes[2] != boxes[1] == boxes[3]


def test_only_axes_with_several_ranks_shard_and_partial_is_refused() -> None:
    assert sharded_axes([Replicate(), Shard(0)], (2, 2), "w") == (1,)
    assert sharded_axes([Replicate(), Shard(0)], (4, 1), "w") == ()
    with pytest.raises(ValueError, match=r"layer\.w has the placement"):
        sharded_axes([Partial()], (2,), "layer.w")
