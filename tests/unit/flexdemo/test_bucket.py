"""Which parameters share a bucket, what its message is made of, and sums over nodes bit by bit."""

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, ExchangeStep, FlexDeMoConfig, Replicator
from lightning_muon.flexdemo.bucket import MomentumBucket, merge, pack, unpack
from lightning_muon.flexdemo.bucket_plan import Shape, plan_buckets
from tests.support.atomics import NoAtomics
from tests.unit.flexdemo.test_replicators import REPLICATORS, short_name

# Primes, smaller than a block, whole blocks, a convolution, a stack, one and no dimension.
SHAPES: list[tuple[int, ...]] = [(13, 7), (127, 13), (3, 4), (16, 24), (6, 4, 3, 3), (3, 10, 6), (5,), (), (1, 19)]
STEP = ExchangeStep(3, 1)


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
