"""Which parameters share a bucket, and the sizes of its messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_muon import DCTTopK, FlexDeMoConfig, Full, Random, Replicator, Slicing
from lightning_muon.flexdemo.bucket_plan import Shape, plan_buckets
from tests.unit.flexdemo.cases import FORMATS, REPLICATORS, drawn, plans_for, short_name


@pytest.mark.parametrize(
    ("whole", "local", "expected"),
    [
        ((6, 4, 3, 3), (6, 4, 3, 3), (24, 9)),
        ((64, 3, 7, 7), (16, 3, 7, 7), (16, 147)),
        ((8, 512, 2048), (2, 512, 2048), (1024, 2048)),
        ((300, 2, 40), (75, 2, 40), (75, 80)),
        ((13, 7), (4, 7), (4, 7)),
        ((5,), (2,), (2, 1)),
        ((5,), (0,), (0, 1)),
        ((), (), (1, 1)),
        ((3, 0), (3, 0), (3, 0)),
    ],
)
def test_a_tensor_is_the_matrix_nearest_to_a_square(
    whole: tuple[int, ...], local: tuple[int, ...], expected: tuple[int, int]
) -> None:
    assert Shape(whole, local).as_matrix() == expected


def test_buckets_begin_with_the_last_parameters() -> None:
    shapes = [Shape((size, 10), (size, 10)) for size in (5, 100, 3, 4, 2, 1)]
    plans = plan_buckets(shapes, FlexDeMoConfig(replicator=Full(), dense_below=0, chunk_bytes=280))
    # 40, 80, 160 bytes fill the first one; what is larger than a bucket has one of its own.
    assert [plan.members for plan in plans] == [(5, 4, 3), (2,), (1,), (0,)]


@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_who_is_together_does_not_depend_on_the_shard(replicator: Replicator) -> None:
    wholes = [(13, 7), (3, 40), (127, 13), (5,), (1, 19)]
    config = FlexDeMoConfig(replicator=replicator, dense_below=16, chunk_bytes=1500)
    members = set()
    for rank in range(4):
        chunks = [torch.empty(whole).chunk(4) for whole in wholes]
        locals_ = [tuple(c[rank].shape) if rank < len(c) else (0, *c[0].shape[1:]) for c in chunks]
        plans = plan_buckets([Shape(*pair) for pair in zip(wholes, locals_, strict=True)], config)
        members.add(tuple(plan.members for plan in plans))
        placed = [place.number for plan in plans for part in plan.parts for place in part.places]
        assert sorted(placed) == [n for n, local in enumerate(locals_) if torch.Size(local).numel()]
    assert len(members) == 1 and len(members.pop()) > 1


def test_small_and_one_dimensional_parameters_travel_dense() -> None:
    assert Shape((10**6,), (10,)).is_dense(0)
    assert Shape((63, 65), (63, 65)).is_dense(4096)
    assert not Shape((64, 64), (1, 64)).is_dense(4096)
    for value_format in FORMATS:
        (plan,) = plans_for(drawn([(13, 7), (5,), (3, 3)], seed=0), DCTTopK(top_k=2), value_format=value_format)
        compressed, dense = plan.parts
        assert [place.number for place in compressed.places] == [0]
        assert [place.number for place in dense.places] == [2, 1]
        assert dense.replicator == Full()
        assert dense.values.num_bytes(1, 14) == 14 * (4 if value_format == "fp32" else 2)


@pytest.mark.parametrize(
    ("replicator", "values", "bits"),
    [
        (DCTTopK(), "bf16", 32 * 32 / 4096),
        (DCTTopK(top_k=8), "fp32", 8 * 48 / 4096),
        (DCTTopK(top_k=4, strips=True), "bf16", 4 * 32 / 64),
        (DCTTopK(top_k=32), "int8", 32 * 24 / 4096 + 16 / 4096),
        (DCTTopK(top_k=32), "sign", 32 * 17 / 4096 + 16 / 4096),
        (Random(rate=1 / 16), "bf16", 1.0),
        (Slicing(rate=1 / 16), "fp32", 2.0),
        (Full(), "sign", 1 + 16 / 256),
    ],
    ids=str,
)
def test_bits_of_whole_blocks_are_those_of_the_docs(replicator: Replicator, values: Any, bits: float) -> None:
    config = FlexDeMoConfig(replicator=replicator, value_format=values, dense_below=0, chunk_bytes=1 << 30)
    (plan,) = plan_buckets([Shape((640, 1280), (640, 1280))], config)
    assert 8 * plan.message_bytes() / (640 * 1280) == pytest.approx(bits, rel=1e-12)
