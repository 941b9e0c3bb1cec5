"""Sizes of messages against messages that were made."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_muon.flexdemo.bucket_plan import num_blocks
from lightning_muon.flexdemo.replicator import Replicator, Turn
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo, Full, NoReplication, Random, Slicing, Striding
from lightning_muon.flexdemo.wire import VALUE_FORMATS, pack_positions, value_format
from tests.unit.flexdemo.cases import bits_per_parameter, matrix_bytes

REPLICATORS = [
    DCTTopK(),
    DCTTopK(chunk_size=16, top_k=5),
    DCTTopK(chunk_size=512, top_k=9),
    DCTTopK(top_k=4, strips=True),
    Random(rate=0.1),
    Striding(rate=0.1),
    Slicing(rate=0.1),
    Full(),
]


@pytest.mark.parametrize("replicator", REPLICATORS, ids=str)
@pytest.mark.parametrize("values", VALUE_FORMATS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (13, 7), (127, 300)])
def test_a_message_has_the_bytes_that_were_counted(replicator: Replicator, values: str, rows: int, cols: int) -> None:
    shape = replicator.block_shape(rows, cols) or (rows * cols,)
    blocks = torch.randn(num_blocks(replicator.block_shape(rows, cols), rows, cols), *shape)
    sent, positions = replicator.encode(blocks, Turn(0, 0))
    message = [value_format(values).pack(sent)]
    if positions is not None:
        message.append(pack_positions(positions, math.prod(shape)))
    assert (positions is not None) == replicator.sends_positions
    counted = matrix_bytes(replicator, values, rows, cols)
    assert counted == sum(part.numel() for part in message)
    assert bits_per_parameter(replicator, values, rows, cols) == 8 * counted / (rows * cols)


@pytest.mark.parametrize(
    ("replicator", "values", "bits"),
    [
        (DCTTopK(), "bf16", 32 * 32 / 4096),
        (DCTTopK(top_k=8), "fp32", 8 * 48 / 4096),
        (DCTTopK(top_k=4, strips=True), "bf16", 4 * 32 / 64),
        (DCTTopK(top_k=32), "int8", 32 * 24 / 4096 + 16 / 4096),
        (DCTTopK(top_k=32), "sign", 32 * 17 / 4096 + 16 / 4096),
        (Random(rate=1 / 16), "bf16", 1.0),
        (Striding(rate=1 / 16), "bf16", 1.0),
        (Slicing(rate=1 / 16), "fp32", 2.0),
        (Full(), "bf16", 16.0),
        (Full(), "sign", 1 + 16 / 256),
        (NoReplication(), "bf16", 0.0),
        (DiLoCo(period=100), "bf16", 0.32),
    ],
    ids=str,
)
def test_bits_of_whole_blocks_are_those_of_the_docstrings(replicator: Replicator, values: str, bits: float) -> None:
    assert bits_per_parameter(replicator, values, 640, 1280) == pytest.approx(bits, rel=1e-12)


def test_an_empty_shard_sends_nothing() -> None:
    assert matrix_bytes(DCTTopK(), "int8", 0, 64) == matrix_bytes(Full(), "bf16", 13, 0) == 0


@pytest.mark.parametrize(
    ("shape", "expected"), [((), 1), ((64,), math.ceil(127 * 300 / 64)), ((64, 64), 10), ((127, 300), 1)]
)
def test_the_last_block_may_be_part_of_one(shape: tuple[int, ...], expected: int) -> None:
    assert num_blocks(shape, 127, 300) == expected
