"""Which parameters share a bucket, the sizes of its messages, and how values and indices become bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, FlexDeMoConfig, Full, Random, Replicator, Slicing
from lightning_muon.flexdemo.bucket_plan import Shape, plan_buckets
from lightning_muon.flexdemo.wire import VALUE_FORMATS, as_bytes, index_dtype
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


SHAPES = [(1, 1), (13, 7), (2, 257), (1, 1000), (127, 32)]
ROW = 256


@pytest.mark.parametrize(
    ("block_numel", "num_bytes"), [(1, 2), (4096, 2), (32769, 2), (65536, 2), (65537, 4), (1 << 31, 4)]
)
def test_indices_take_as_few_bytes_as_hold_them(block_numel: int, num_bytes: int) -> None:
    # The ends, and both sides of where 16 bits have their sign.
    indices = torch.tensor([0, block_numel - 1, 32767, 32768, 65535, 65536, 1]).clamp(max=block_numel - 1)
    dtype = index_dtype(block_numel)
    packed = as_bytes(indices.to(dtype))
    assert packed.numel() == 7 * num_bytes
    assert torch.equal(packed.view(dtype).to(torch.int64), indices)


def rows_of(values: Tensor) -> list[Tensor]:
    """Values that share a scale."""
    return [row for block in values for row in block.split(ROW)]


@pytest.mark.parametrize("name", VALUE_FORMATS)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 8), (1, 0)], ids=str)
def test_a_message_has_the_counted_bytes_and_rounded_values(name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(sum(shape))
    values, way = torch.randn(shape), VALUE_FORMATS[name]
    before = values.clone()
    packed = way.pack(values)
    assert packed.dtype == torch.uint8 and packed.shape == (way.num_bytes(*shape),)
    unpacked = way.unpack(packed, *shape)
    assert unpacked.dtype == torch.float32 and unpacked.shape == shape
    assert torch.equal(unpacked, way.rounded(values)) and torch.equal(values, before)
    if name in ("fp32", "bf16"):
        assert torch.equal(unpacked, values.to(torch.float32 if name == "fp32" else torch.bfloat16).float())
    # Behind other parts of a message.
    message = torch.cat([torch.zeros(8, dtype=torch.uint8), packed])
    assert torch.equal(way.unpack(message[8:], *shape), unpacked)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_int8_errs_by_half_a_step_of_its_row(shape: tuple[int, int], size: float) -> None:
    torch.manual_seed(sum(shape))
    values = torch.randn(shape) * size
    rounded = VALUE_FORMATS["int8"].rounded(values)
    for row, found in zip(rows_of(values), rows_of(rounded), strict=True):
        step = row.abs().max() / 127
        # Half a step of a scale that bfloat16 rounds by up to 2^-8, and as much of 127 steps at the largest.
        assert (row - found).abs().max() <= step * (0.5 + 127 / 256)
        inner = row.abs() < 0.99 * row.abs().max()
        assert not inner.any() or (row - found)[inner].abs().max() <= 0.5 * step * (1 + 1 / 128)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_signs_come_back_with_the_mean_magnitude_of_a_row(shape: tuple[int, int]) -> None:
    torch.manual_seed(sum(shape))
    values = torch.randn(shape)
    rounded = VALUE_FORMATS["sign"].rounded(values)
    for row, found in zip(rows_of(values), rows_of(rounded), strict=True):
        assert torch.equal(found.sign(), row.sign())
        # bfloat16 has 8 bits.
        assert torch.allclose(found.abs(), row.abs().mean().expand_as(row), rtol=2**-8)


@pytest.mark.parametrize("name", VALUE_FORMATS)
def test_what_the_format_can_hold_is_not_changed(name: str) -> None:
    torch.manual_seed(0)
    values = {
        "fp32": torch.randn(5, 300),
        "bf16": torch.randn(5, 300).bfloat16().float(),
        "int8": torch.randint(-127, 128, (5, 300)).float() * 0.25,
        "sign": torch.randint(0, 2, (5, 300)).float() * 3 - 1.5,
    }[name]
    # Every row has its largest integer, so that the scale is a power of two.
    values[:, ::40] = {"int8": 127 * 0.25, "sign": 1.5}.get(name, 1.0)
    assert torch.equal(VALUE_FORMATS[name].rounded(values), values)
    assert torch.equal(VALUE_FORMATS[name].rounded(torch.zeros(4, 300)), torch.zeros(4, 300))
    for smallest in (1e-45, 1e-38):
        rounded = VALUE_FORMATS[name].rounded(torch.full((2, 7), smallest))
        assert rounded.isfinite().all() and rounded.abs().max() <= 1.1e-38
