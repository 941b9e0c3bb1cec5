"""Replicators: what they send of a block, what that stands for, and how mistakes of new ones are found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lightning_muon import (
    Components,
    DCTTopK,
    ExchangeStep,
    FlexDeMoConfig,
    Full,
    Random,
    Replicator,
    Slicing,
    Striding,
)
from lightning_muon.flexdemo.bucket import MomentumBucket, Shape, merge, pack, plan_buckets, unpack
from lightning_muon.flexdemo.replicators import check_replicator, largest
from tests.support.atomics import NoAtomics

STEP = ExchangeStep(step=3, bucket=1)
REPLICATORS: list[Replicator] = [
    DCTTopK(chunk_size=8, top_k=5),
    DCTTopK(chunk_size=16, top_k=3, strips=True),
    Random(rate=0.25, seed=3),
    Striding(rate=1 / 3),
    Slicing(rate=0.25),
    Full(),
]


def short_name(value: object) -> str:
    return type(value).__name__ + ("-strips" if getattr(value, "strips", False) else "")


@pytest.mark.parametrize("numel", [1, 127, 832, 4096])
@pytest.mark.parametrize("count", [1, 32, 127])
def test_the_largest_are_those_of_a_full_sort(numel: int, count: int) -> None:
    torch.manual_seed(numel + count)
    count = min(count, numel)
    # Few different numbers: many ties.
    for rows in (torch.randn(6, numel), torch.randint(-3, 4, (6, numel)).float(), torch.zeros(6, numel)):
        found = largest(rows, count)
        assert all(len(set(row)) == count for row in found.tolist())
        magnitudes = rows.abs().gather(1, found).sort(1, descending=True).values
        assert torch.equal(magnitudes, rows.abs().sort(1, descending=True).values[:, :count])
        assert torch.equal(found[2:4], largest(rows[2:4].clone(), count)), "other rows have changed the choice"


def test_a_nan_is_among_the_largest() -> None:
    rows = torch.randn(1, 4096)
    rows[0, 77] = float("nan")
    rows[0, 78] = float("inf")
    assert {77, 78} <= set(largest(rows, 4)[0].tolist())


def _drawn(replicator: Random, numel: int, exchange: ExchangeStep) -> list[int]:
    """Which elements are sent: the values of a block that counts."""
    values, indices = replicator.encode(torch.arange(numel, dtype=torch.float32)[None], exchange)
    assert indices is None
    return [int(value) for value in values[0].tolist()]


def test_random_sends_one_element_of_each_cell_and_all_equally_often() -> None:
    replicator, counts = Random(rate=0.125, seed=5), torch.zeros(29)
    for step in range(2000):
        elements = _drawn(replicator, 29, ExchangeStep(step, 0))
        assert [element // 8 for element in elements] == list(range(replicator.num_sent(29))) == [0, 1, 2, 3]
        counts[elements] += 1
    # Binomial with p = 1 / 8 (standard deviation 15), in the short last cell p = 1 / 5 (18); six deviations.
    assert (counts[:24] - 250).abs().max() < 6 * 15
    assert (counts[24:] - 400).abs().max() < 6 * 18


def test_draws_depend_on_seed_step_and_part_only() -> None:
    before = torch.get_rng_state()
    here = _drawn(Random(rate=0.1, seed=3), 1000, ExchangeStep(7, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert _drawn(Random(rate=0.1, seed=3), 1000, ExchangeStep(7, 2)) == here
    others = [(3, ExchangeStep(8, 2)), (3, ExchangeStep(7, 3)), (4, ExchangeStep(7, 2))]
    assert all(_drawn(Random(rate=0.1, seed=seed), 1000, exchange) != here for seed, exchange in others)


@dataclass(frozen=True)
class _Largest(Replicator):
    """The two largest elements of each strip of 8."""

    sends_indices: ClassVar[bool] = True

    def block_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        return (8,)

    def num_sent(self, block_numel: int) -> int:
        return 2

    def encode(self, blocks: Tensor, exchange: ExchangeStep) -> Components:
        indices = blocks.abs().topk(2, dim=1).indices
        return Components(blocks.gather(1, indices), indices)

    def decode(self, components: Components, block_shape: tuple[int, ...], exchange: ExchangeStep) -> Tensor:
        blocks = torch.zeros(len(components.values), *block_shape)
        return blocks.scatter_add_(1, components.indices, components.values)


def _encoding(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]) -> Callable[..., Components]:
    return lambda self, blocks, exchange: Components(*change(*_Largest.encode(self, blocks, exchange)))


@pytest.mark.parametrize(
    ("method", "mistake", "message"),
    [
        ("encode", lambda self, blocks, exchange: _Largest.encode(self, blocks.abs_(), exchange), "changes the blocks"),
        ("num_sent", lambda self, numel: 3, r"num_sent\(8\) says"),
        ("num_sent", lambda self, numel: 0, r"num_sent\(8\) is 0: blocks of shape \(8,\) would never be trained"),
        ("encode", _encoding(lambda values, _: (values, None)), "sends_indices is True, but encode gives no indices"),
        ("encode", _encoding(lambda values, indices: (values, indices + 8)), r"indices are no int64 in \[0, 8\)"),
        ("encode", _encoding(lambda values, indices: (values, indices[:, [0, 0]])), "an index occurs twice in a block"),
        ("subtract_", lambda self, blocks, *_: blocks.zero_(), "subtract_ takes off something else than decode gives"),
    ],
)
def test_a_replicator_that_breaks_the_contract_is_an_error(method: str, mistake: Any, message: str) -> None:
    check_replicator(_Largest())
    with pytest.raises(ValueError, match=f"_Broken.*{message}"):
        check_replicator(type("_Broken", (_Largest,), {method: mistake})())


# Primes, smaller than a block, whole blocks, a convolution, a stack, one and no dimension.
_SHAPES: list[tuple[int, ...]] = [(13, 7), (127, 13), (3, 4), (16, 24), (6, 4, 3, 3), (3, 10, 6), (5,), (), (1, 19)]


@pytest.mark.parametrize("replicator", [*REPLICATORS, DCTTopK(chunk_size=8, top_k=30)], ids=short_name)
def test_no_atomics_decide_over_the_bits_of_an_update(replicator: Replicator) -> None:
    """From the gradients of five nodes to the merged update; with 30 of 64 coefficients by the dense inverse."""
    torch.manual_seed(0)
    tensors = [torch.zeros(shape) for shape in _SHAPES]
    config = FlexDeMoConfig(replicator=replicator, dense_below=10)
    (plan,) = plan_buckets([Shape(shape, shape) for shape in _SHAPES], config)
    bucket = MomentumBucket(plan, tensors, {tensor: torch.randn(tensor.shape) for tensor in tensors})
    with NoAtomics():
        of_nodes = []
        for _ in range(5):
            bucket.accumulate({tensor: torch.randn(tensor.shape) for tensor in tensors}, 0.9)
            sent = bucket.encode(STEP)
            bucket.subtract_sent(sent, STEP, set(tensors))
            of_nodes.append(unpack(plan, pack(plan, sent)))
        parts = zip(zip(*of_nodes, strict=True), plan.parts, strict=True)
        merged = [merge(components, "contributors", part.block_numel) for components, part in parts]
        bucket.decode(merged, STEP, set(tensors), sign=True)
