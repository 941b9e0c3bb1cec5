"""Which parameters share a bucket, what its message is made of, and sums over nodes bit by bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, ExchangeStep, FlexDeMoConfig, Full, Random, Replicator, Slicing
from lightning_muon.flexdemo.bucket import MomentumBucket, merge, pack, unpack
from lightning_muon.flexdemo.bucket_plan import Shape, plan_buckets
from tests.support.atomics import NoAtomics
from tests.unit.flexdemo.test_replicators import REPLICATORS, short_name

# Primes, smaller than a block, whole blocks, a convolution, a stack, one and no dimension.
SHAPES: list[tuple[int, ...]] = [(13, 7), (127, 13), (3, 4), (16, 24), (6, 4, 3, 3), (3, 10, 6), (5,), (), (1, 19)]
STEP = ExchangeStep(3, 1)


@pytest.mark.parametrize(
    ("replicator", "value_format", "bits"),
    [
        (DCTTopK(), "bf16", 32 * 32 / 4096),
        (DCTTopK(top_k=8), "fp32", 8 * 48 / 4096),
        (DCTTopK(top_k=4, strips=True), "bf16", 4 * 32 / 64),
        (Random(rate=1 / 16), "bf16", 1.0),
        (Slicing(rate=1 / 16), "fp32", 2.0),
        (Full(), "bf16", 16.0),
    ],
    ids=str,
)
def test_bits_of_whole_blocks_are_those_of_the_docs(replicator: Replicator, value_format: Any, bits: float) -> None:
    config = FlexDeMoConfig(replicator=replicator, value_format=value_format, dense_below=0, bucket_bytes=1 << 30)
    (plan,) = plan_buckets([Shape((640, 1280), (640, 1280))], config)
    assert 8 * plan.message_bytes() / (640 * 1280) == pytest.approx(bits, rel=1e-12)


def _bucket(replicator: Replicator) -> tuple[MomentumBucket, list[Tensor], dict[Tensor, Tensor]]:
    """A bucket of all shapes, its parameters and their residuals."""
    tensors = [torch.zeros(shape) for shape in SHAPES]
    config = FlexDeMoConfig(replicator=replicator, dense_below=10)
    (plan,) = plan_buckets([Shape(shape, shape) for shape in SHAPES], config)
    residuals = {tensor: torch.randn(tensor.shape) for tensor in tensors}
    return MomentumBucket(plan, tensors, residuals), tensors, residuals


@pytest.mark.parametrize("replicator", [*REPLICATORS, DCTTopK(chunk_size=8, top_k=30)], ids=short_name)
def test_no_atomics_decide_over_the_bits_of_an_update(replicator: Replicator) -> None:
    """From the gradients of five nodes to the merged update; with 30 of 64 coefficients by the dense inverse."""
    torch.manual_seed(0)
    bucket, tensors, _ = _bucket(replicator)
    with NoAtomics():
        of_nodes = []
        for _ in range(5):
            bucket.accumulate({tensor: torch.randn(tensor.shape) for tensor in tensors}, 0.9)
            sent = bucket.encode(STEP)
            bucket.subtract_sent(sent, STEP, set(tensors))
            of_nodes.append(unpack(bucket.plan, pack(bucket.plan, sent)))
        parts = zip(zip(*of_nodes, strict=True), bucket.plan.parts, strict=True)
        merged = [merge(components, "contributors", part.block_numel) for components, part in parts]
        bucket.decode(merged, STEP, set(tensors), sign=True)
