"""Boxes of every rank, against torch.chunk."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from lightning_muon.params import layout
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


def test_torch_is_asked_once_for_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    ask = layout.local_shape_and_offset
    monkeypatch.setattr(layout, "local_shape_and_offset", lambda *args: asked.append(args[2]) or ask(*args))
    coordinates = [(replica, rank) for replica in range(5) for rank in range(3)]
    assert held_boxes((13, 7), (5, 3), [Replicate(), Shard(0)], coordinates)[3:6] == held_boxes(
        (13, 7), (3,), [Shard(0)], [(rank,) for rank in range(3)]
    )
    assert len(asked) == 3 + 3
