"""Who travels with whom, and how many bytes that is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, Full, Random, Replicator, Striding
from lightning_muon.flexdemo.bucket import pack
from lightning_muon.flexdemo.bucket_plan import (
    BucketPlan,
    Shape,
    is_dense,
    is_summed,
    matrix_view,
    message_bytes,
    plan_buckets,
    returned_dtype,
    segment,
    segment_bytes,
    sent_bytes,
)
from lightning_muon.flexdemo.node_exchange import Exchange, pack_segment
from lightning_muon.flexdemo.replicator import Components, ExchangeStep
from lightning_muon.flexdemo.wire import SCALED_TOGETHER, pack_indices
from tests.unit.flexdemo.cases import (
    FORMATS,
    REPLICATORS,
    SHAPES,
    PostOffice,
    drawn,
    nodes_of,
    one_bucket,
    plans_for,
    short_name,
)

LARGE = [(40, 33), (127, 13), (5,), (3, 4)]


def _sent(shapes: list[tuple[int, ...]], replicator: Replicator, value_format: str) -> tuple[Any, list[Components]]:
    """A plan, and components for it."""
    tensors = drawn(shapes, seed=0)
    bucket, residuals = one_bucket(tensors, replicator, seed=1, value_format_name=value_format)
    bucket.load(residuals)
    return bucket.plan, bucket.encode(ExchangeStep(0, 0))


@pytest.mark.parametrize(
    ("whole", "local", "expected"),
    [
        ((6, 4, 3, 3), (6, 4, 3, 3), (24, 9)),
        ((64, 3, 7, 7), (16, 3, 7, 7), (16, 147)),
        ((8, 512, 2048), (8, 512, 2048), (4096, 2048)),
        ((8, 512, 2048), (2, 512, 2048), (1024, 2048)),
        ((9, 40, 5), (9, 40, 5), (9, 200)),
        ((300, 2, 40), (75, 2, 40), (75, 80)),
        ((13, 7), (4, 7), (4, 7)),
        ((5,), (2,), (2, 1)),
        ((), (), (1, 1)),
        ((3, 0), (3, 0), (3, 0)),
    ],
)
def test_a_tensor_is_the_matrix_nearest_to_a_square(
    whole: tuple[int, ...], local: tuple[int, ...], expected: tuple[int, int]
) -> None:
    assert matrix_view(Shape(whole, local)) == expected


def test_buckets_begin_with_the_last_parameters() -> None:
    shapes = [Shape((size, 10), (size, 10)) for size in (5, 100, 3, 4, 2, 1)]
    plans = plan_buckets(shapes, replicator=Full(), value_format_name="bf16", dense_below=0, chunk_bytes=280)
    # 40, 80, 160 bytes fill the first one; what is larger than a bucket has one of its own.
    assert [plan.members for plan in plans] == [(5, 4, 3), (2,), (1,), (0,)]


@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_who_is_together_does_not_depend_on_the_shard(replicator: Replicator) -> None:
    wholes = [(13, 7), (3, 40), (127, 13), (5,), (1, 19)]
    of_ranks = [
        [Shape(whole, tuple(part.shape)) for whole, part in zip(wholes, parts, strict=True)]
        for parts in zip(*(_shards(whole, 4) for whole in wholes), strict=True)
    ]
    options: dict[str, Any] = {"value_format_name": "bf16", "dense_below": 16, "chunk_bytes": 1500}
    plans = [plan_buckets(shapes, replicator=replicator, **options) for shapes in of_ranks]
    assert len({tuple(plan.members for plan in of_rank) for of_rank in plans}) == 1
    assert len(plans[0]) > 1
    for shapes, of_rank in zip(of_ranks, plans, strict=True):
        placed = [place.number for plan in of_rank for part in plan.parts for place in part.places]
        assert sorted(placed) == [n for n, shape in enumerate(shapes) if torch.Size(shape.local).numel()]


def _shards(whole: tuple[int, ...], num_shards: int) -> list[Tensor]:
    tensor = torch.zeros(whole)
    pieces = list(torch.chunk(tensor, num_shards))
    return pieces + [tensor[:0]] * (num_shards - len(pieces))


def test_small_and_one_dimensional_parameters_travel_dense() -> None:
    assert is_dense(Shape((10**6,), (10,)), dense_below=0)
    assert is_dense(Shape((63, 65), (63, 65)), dense_below=4096)
    assert not is_dense(Shape((64, 64), (1, 64)), dense_below=4096)
    tensors = drawn([(13, 7), (5,), (3, 3)], seed=0)
    for value_format, dense_format in (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "bf16"), ("sign", "bf16")):
        (plan,) = plans_for(tensors, DCTTopK(top_k=2), value_format_name=value_format)
        compressed, dense = plan.parts
        assert [place.number for place in compressed.places] == [0]
        assert [place.number for place in dense.places] == [2, 1]
        assert dense.replicator == Full()
        assert dense.values.num_bytes(1, 14) == 14 * (4 if dense_format == "fp32" else 2)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_message_bytes_are_those_of_the_message(replicator: Replicator, value_format: str) -> None:
    plan, components = _sent(SHAPES, replicator, value_format)
    message = pack(plan, components)
    assert message.dtype == torch.uint8
    assert message.numel() == message_bytes(plan)
    offset = 0
    for part, (values, indices) in zip(plan.parts, components, strict=True):
        for found in (
            None if indices is None else pack_indices(indices, part.block_numel),
            part.values.pack(values.reshape(part.wire_shape)),
        ):
            if found is not None:
                assert offset % 8 == 0
                assert torch.equal(message[offset : offset + found.numel()], found)
                offset += -(-found.numel() // 8) * 8
    assert offset == message.numel()


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("replicator", [Full(), Random(rate=0.5), Striding(rate=0.1)], ids=short_name)
def test_segments_hold_every_value_once(replicator: Replicator, num_nodes: int) -> None:
    for value_format in FORMATS:
        plan, components = _sent(LARGE, replicator, value_format)
        for part, (values, _) in zip(plan.parts, components, strict=True):
            ranges = [segment(part, node, num_nodes) for node in range(num_nodes)]
            assert ranges[0][0] == 0
            assert ranges[-1][1] == values.numel()
            assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
            assert all(start % SCALED_TOGETHER == 0 or start == values.numel() for start, _ in ranges)
        for node in range(num_nodes):
            packed = pack_segment(plan, components, node, num_nodes)
            assert packed.numel() == segment_bytes(plan, node, num_nodes)


def test_three_nodes_with_shared_indices_sum_values() -> None:
    (largest,), (every,) = (plans_for([torch.zeros(40, 40)], replicator) for replicator in (DCTTopK(), Full()))
    assert [is_summed(largest, num_nodes) for num_nodes in (2, 3, 8)] == [False, False, False]
    assert [is_summed(every, num_nodes) for num_nodes in (2, 3, 8)] == [False, True, True]


@pytest.mark.parametrize("value_format", FORMATS)
def test_sums_travel_exactly_only_where_values_do(value_format: str) -> None:
    (plan,) = plans_for([torch.zeros(40, 40)], Full(), value_format_name=value_format)
    assert returned_dtype(plan) == (torch.float32 if value_format == "fp32" else torch.bfloat16)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_sent_bytes_are_those_that_leave_a_node(
    monkeypatch: pytest.MonkeyPatch, replicator: Replicator, num_nodes: int, value_format: str
) -> None:
    post = PostOffice().take_over(monkeypatch)
    plan, components = _sent(LARGE, replicator, value_format)
    exchanges = [Exchange(plan, components, groups) for groups in nodes_of(num_nodes)]
    for each in exchanges:
        each.groups.send_sums_until(each)
    for node in range(num_nodes):
        assert post.sent_bytes.get(node, 0) == sent_bytes(plan, node, num_nodes)


def test_traffic_of_summed_values_does_not_grow_with_the_nodes() -> None:
    (plan,) = plans_for([torch.zeros(640, 100)], Striding(rate=0.1))
    message = message_bytes(plan)
    for num_nodes in (3, 5, 10):
        most = max(sent_bytes(plan, node, num_nodes) for node in range(num_nodes))
        # 2 (R - 1) / R messages, and what rounding segments up to 256 values adds.
        assert most <= 2 * message * (num_nodes - 1) / num_nodes + 8 * SCALED_TOGETHER * num_nodes
    assert sent_bytes(plan, 0, 2) == message
    empty = BucketPlan((0,), ())
    assert [sent_bytes(empty, 0, num_nodes) for num_nodes in (1, 2, 5)] == [0, 0, 0]
