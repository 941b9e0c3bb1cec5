"""Boxes, the matrices inside a parameter, and the shards of every rank against torch.chunk."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from lightning_muon.params.layout import Box, Layout, RoutedParameter, held_boxes
from lightning_muon.params.matrices import Matrix, ShardBoxes, matrices_in, tile
from lightning_muon.params.routing import Route


def _route(kind: str, **options: object) -> Route:
    return Route(name="w", kind=kind, reason="", **options)  # type: ignore[arg-type]


def _matrices(shape: tuple[int, ...], route: Route) -> list[Matrix]:
    parameter, shards = nn.Parameter(torch.empty(shape)), ShardBoxes([Box((0,) * len(shape), shape)])
    routed = RoutedParameter(parameter, {}, route, Layout())
    found = enumerate(matrices_in(shape, route))
    return [Matrix(routed, *matrix, number, shards, rank=0, flops=0) for number, matrix in found]


def test_matrices_of_a_parameter_follow_its_kind() -> None:
    found = _matrices((2, 3, 4, 5), _route("stack"))
    assert [matrix.name for matrix in found][:4] == ["w[0, 0]", "w[0, 1]", "w[0, 2]", "w[1, 0]"]
    assert all((matrix.rows, matrix.cols, matrix.box.numel) == (4, 5, 20) for matrix in found)
    assert len(found) == 6
    (convolution,) = _matrices((6, 4, 3, 3), _route("convolution"))
    assert (convolution.name, convolution.rows, convolution.cols) == ("w", 6, 36)
    query, key_value = _matrices((12, 5), _route("matrix", splits=(4, 8)))
    assert (query.rows, query.cols, key_value.box) == (4, 5, Box((4, 0), (12, 5)))
    parts = _matrices((5, 12), _route("matrix", splits=(4, 4, 4), split_dim=1))
    assert [(part.rows, part.cols, part.box.start) for part in parts] == [(5, 4, (0, 4 * index)) for index in range(3)]
    assert [part.name for part in parts] == ["w[0]", "w[1]", "w[2]"]
    assert not matrices_in((4, 5), _route("elementwise")) and not matrices_in((0, 5), _route("matrix"))


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
