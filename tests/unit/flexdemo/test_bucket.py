"""Which parameters share a bucket, what its message is made of, and sums over nodes bit by bit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon import Components, DCTTopK, ExchangeStep, FlexDeMoConfig, Full, Random, Replicator, Slicing
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


@pytest.mark.parametrize("value_format", ["fp32", "bf16"])
def test_a_message_keeps_indices_and_rounded_values(value_format: Any) -> None:
    """Indices of blocks of up to 2^16 elements take 16 bits, of larger ones 32; the last parameter travels dense."""
    replicator = DCTTopK(chunk_size=1 << 17, top_k=3)
    config = FlexDeMoConfig(replicator=replicator, value_format=value_format, dense_below=10)
    plan = plan_buckets([Shape(shape, shape) for shape in ((1 << 8, 1 << 8), (257, 257), (5,))], config)[0]
    torch.manual_seed(0)
    # The ends, and both sides of where 16 bits have their sign.
    indices = [torch.tensor([[66048, 65536, 0]]), torch.tensor([[65535, 32767, 32768]]), None]
    sent = [Components(torch.randn(part.sent_shape), each) for part, each in zip(plan.parts, indices, strict=True)]
    message = pack(plan, sent)
    assert (message.dtype, message.numel()) == (torch.uint8, plan.message_bytes())
    assert [part.index_dtype.itemsize for part in plan.parts[:2]] == [4, 2]
    for (values, found), (own, expected) in zip(unpack(plan, message), sent, strict=True):
        assert torch.equal(values, own.to(plan.value_dtype).float())
        assert found is expected is None or torch.equal(found, expected)  # type: ignore[arg-type]


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


def test_signs_are_those_of_the_update_and_keep_a_nan() -> None:
    bucket, tensors, residuals = _bucket(REPLICATORS[0])
    bucket.accumulate({}, 1.0)
    plain, signs = (bucket.decode(bucket.encode(STEP), STEP, set(tensors), sign=sign) for sign in (False, True))
    for tensor in tensors:
        assert torch.equal(signs[tensor], plain[tensor].sign())
    residuals[tensors[6]][1] = torch.nan  # Which travels dense.
    bucket.accumulate({}, 1.0)
    assert bucket.decode(bucket.encode(STEP), STEP, set(tensors), sign=True)[tensors[6]].isnan().any()


@pytest.mark.parametrize("rule", ["contributors", "mean"])
@pytest.mark.parametrize("num_nodes", [2, 3, 5])
def test_sums_are_made_in_the_order_of_the_nodes_without_atomics(rule: str, num_nodes: int) -> None:
    """Bit for bit, for more blocks than are summed at a time."""
    torch.manual_seed(num_nodes)
    num_blocks, num_sent, numel = 300, 40, 64 * 64
    # Distinct indices in each block, as of a top-k, many of which several nodes send.
    nodes = [
        Components(torch.randn(num_blocks, num_sent), 67 * torch.rand(num_blocks, 60).argsort(1)[:, :num_sent])
        for _ in range(num_nodes)
    ]
    with NoAtomics():
        found = merge(nodes, rule, numel)
    expected, counts, sums = (torch.zeros(num_blocks, numel) for _ in range(3))
    for values, indices in nodes:
        for column in range(num_sent):
            place = indices[:, column : column + 1]
            expected.scatter_(1, place, expected.gather(1, place) + values[:, column : column + 1])
            counts.scatter_(1, place, counts.gather(1, place) + 1)
    expected /= num_nodes if rule == "mean" else counts.clamp(min=1)
    for column in torch.randperm(found.values.size(1)).tolist():
        place = found.indices[:, column : column + 1]
        sums.scatter_(1, place, sums.gather(1, place) + found.values[:, column : column + 1])
    assert torch.equal(sums, expected)
