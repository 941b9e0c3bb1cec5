"""Momenta into messages and back, against loops over blocks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, Full, Random, Replicator, Slicing, Striding
from lightning_muon.flexdemo.bucket import Bucket, merged, pack, unpack
from lightning_muon.flexdemo.bucket_plan import matrix_view
from lightning_muon.flexdemo.replicator import Components, Turn
from tests.reference.flexdemo import blocks_of, columns, dct
from tests.support.atomics import NoAtomics
from tests.unit.flexdemo.cases import (
    FORMATS,
    REPLICATORS,
    SHAPES,
    drawn,
    one_bucket,
    plans_for,
    shapes_of,
    short_name,
)

TURN = Turn(3, 1)


def _after_exchange_alone(
    replicator: Replicator, value_format: str, *, scales: bool = False, seed: int = 0
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(momenta that were accumulated, updates, residuals afterwards) of a node that merges with nobody."""
    tensors, gradients = drawn(SHAPES, seed), drawn(SHAPES, seed + 1)
    bucket, residuals = one_bucket(tensors, replicator, seed + 2, value_format_name=value_format)
    factors = {tensor: 0.5 + number for number, tensor in enumerate(tensors) if number % 2} if scales else {}
    expected = [
        0.9 * residuals[tensor] + factors.get(tensor, 1.0) * gradient
        for tensor, gradient in zip(tensors, gradients, strict=True)
    ]
    bucket.accumulate(dict(zip(tensors, gradients, strict=True)), 0.9, factors)
    sent = bucket.encode(TURN)
    bucket.settle(sent, TURN, residuals)
    updates = {tensor: torch.full_like(tensor, float("nan")) for tensor in tensors}
    bucket.decode(merged(bucket.plan, [sent], "mean"), TURN, updates, sign=False)
    return expected, [updates[t] for t in tensors], [residuals[t] for t in tensors]


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_what_is_sent_and_what_stays_are_the_momentum(replicator: Replicator, value_format: str, scales: bool) -> None:
    momenta, updates, residuals = _after_exchange_alone(replicator, value_format, scales=scales)
    for momentum, update, residual in zip(momenta, updates, residuals, strict=True):
        # Some roundings of numbers of size 5, and of a transform of 16 to 64 of them.
        torch.testing.assert_close(update + residual, momentum, rtol=0, atol=1e-5)


def test_the_largest_coefficients_of_each_block_are_sent() -> None:
    momenta, updates, _ = _after_exchange_alone(DCTTopK(chunk_size=8, top_k=5), "fp32")
    for momentum, update in zip(momenta, updates, strict=True):
        if momentum.ndim < 2:
            assert torch.equal(update, momentum)
            continue
        cols = columns(momentum.shape)
        wholes = (momentum, update, torch.ones_like(momentum))
        blocks = [[block for _, block in blocks_of(whole.reshape(-1, cols).double(), 8)] for whole in wholes]
        for of_momentum, of_update, inside in zip(*blocks, strict=True):
            height, width = of_momentum.shape
            coefficients = dct(height) @ of_momentum @ dct(width).T
            kept = torch.zeros(height * width, dtype=torch.float64)
            largest = coefficients.abs().flatten().topk(min(5, kept.numel())).indices
            kept[largest] = coefficients.flatten()[largest]
            expected = dct(height).T @ kept.view(height, width) @ dct(width)
            # What falls into the padding of a block is not applied.
            torch.testing.assert_close(of_update, expected * inside, rtol=0, atol=1e-5)


@pytest.mark.parametrize("replicator", [Striding(rate=1 / 3), Slicing(rate=0.25), Random(rate=0.25)], ids=short_name)
def test_shared_positions_run_through_all_parameters_of_a_bucket(replicator: Replicator) -> None:
    momenta, updates, residuals = _after_exchange_alone(replicator, "fp32")
    order = [number for number in reversed(range(len(SHAPES))) if len(SHAPES[number]) > 1]
    flat, update = (torch.cat([tensors[n].flatten() for n in order]) for tensors in (momenta, updates))
    is_sent = update != 0
    period = round(1 / replicator.rate)  # type: ignore[attr-defined]
    if isinstance(replicator, Striding):
        assert is_sent.nonzero().flatten().tolist() == list(range(TURN.step % period, flat.numel(), period))
    elif isinstance(replicator, Slicing):
        index = TURN.step % period
        positions = range(index * flat.numel() // period, (index + 1) * flat.numel() // period)
        assert is_sent.nonzero().flatten().tolist() == list(positions)
    else:
        assert [int(cell.sum()) for cell in is_sent.split(period)] == [1] * math.ceil(flat.numel() / period)
    assert torch.equal(update[is_sent], flat[is_sent])
    assert (torch.cat([residuals[n].flatten() for n in order])[is_sent] == 0).all()


@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_parameters_that_do_not_take_part_keep_their_residual(replicator: Replicator) -> None:
    tensors = drawn(SHAPES, seed=0)
    bucket, residuals = one_bucket(tensors, replicator, seed=1)
    before = {tensor: residual.clone() for tensor, residual in residuals.items()}
    taking_part = dict.fromkeys(tensors[1::2], torch.zeros(()))
    bucket.accumulate(dict(zip(tensors, drawn(SHAPES, seed=2), strict=True)), 0.9, {})
    bucket.settle(bucket.encode(TURN), TURN, taking_part)
    for tensor in tensors:
        assert torch.equal(residuals[tensor], before[tensor]) == (tensor not in taking_part)
    bucket.settle(bucket.encode(TURN), TURN, {})
    updates = {tensor: torch.full_like(tensor, float("nan")) for tensor in tensors[:2]}
    bucket.decode(bucket.encode(TURN), TURN, updates, sign=False)
    assert all(update.isfinite().all() for update in updates.values())


def test_accumulating_again_begins_with_the_residual() -> None:
    tensors = drawn(SHAPES, seed=0)
    bucket, residuals = one_bucket(tensors, DCTTopK(chunk_size=8, top_k=64), seed=1)
    first, second = (dict(zip(tensors, drawn(SHAPES, seed), strict=True)) for seed in (2, 3))
    bucket.accumulate(first, 0.9, {})
    bucket.accumulate(second, 0.9, {})
    updates = {tensor: torch.empty_like(tensor) for tensor in tensors}
    bucket.decode(bucket.encode(TURN), TURN, updates, sign=False)
    for tensor in tensors:
        expected = 0.9 * residuals[tensor] + second[tensor]
        torch.testing.assert_close(updates[tensor], expected, rtol=0, atol=1e-5)


def test_a_changed_gradient_decay_or_scale_is_noticed() -> None:
    tensors = drawn(SHAPES, seed=0)
    bucket, residuals = one_bucket(tensors, DCTTopK(chunk_size=8, top_k=5), seed=1)
    gradients = dict(zip(tensors, drawn(SHAPES, seed=2), strict=True))
    scales = {tensors[0]: 0.25}
    bucket.accumulate(gradients, 0.9, scales)
    assert bucket.is_accumulated(gradients, 0.9, scales)
    assert not bucket.is_accumulated(gradients, 0.8, scales)
    assert not bucket.is_accumulated(gradients, 0.9, {})
    for tensor in tensors:
        gradients[tensor].view(-1)[-1] += 0.5
        assert not bucket.is_accumulated(gradients, 0.9, scales)
        gradients[tensor].view(-1)[-1] -= 0.5
    residuals[tensors[1]][126, 12] += 1
    assert not bucket.is_accumulated(gradients, 0.9, scales)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_a_message_brings_the_components_to_the_other_side(replicator: Replicator, value_format: str) -> None:
    tensors = drawn(SHAPES, seed=4)
    bucket, residuals = one_bucket(tensors, replicator, seed=5, value_format_name=value_format)
    bucket.load(residuals)
    sent = bucket.encode(TURN)
    for own, (values, positions) in zip(sent, unpack(bucket.plan, pack(bucket.plan, sent)), strict=True):
        # Rounding again may not change anything: what a node keeps is what the others get.
        assert torch.equal(values, own.values)
        assert (positions is None) == (own.positions is None)
        assert positions is None or torch.equal(positions, own.positions)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_what_is_sent_does_not_change_with_the_blocks(replicator: Replicator, value_format: str) -> None:
    tensors = drawn(SHAPES, seed=6)
    bucket, residuals = one_bucket(tensors, replicator, seed=7, value_format_name=value_format)
    bucket.load(residuals)
    sent = bucket.encode(TURN)
    before = [values.clone() for values, _ in sent]
    bucket.settle(sent, TURN, residuals)
    bucket.decode(sent, TURN, {tensor: torch.empty_like(tensor) for tensor in tensors}, sign=False)
    bucket.accumulate(dict(zip(tensors, drawn(SHAPES, seed=8), strict=True)), 0.5, {})
    assert all(torch.equal(values, old) for (values, _), old in zip(sent, before, strict=True))


def test_signs_are_taken_of_the_decoded_update() -> None:
    tensors = drawn(SHAPES, seed=0)
    bucket, residuals = one_bucket(tensors, DCTTopK(chunk_size=8, top_k=5), seed=1)
    bucket.load(residuals)
    sent = bucket.encode(TURN)
    plain, signs = ({tensor: torch.empty_like(tensor) for tensor in tensors} for _ in range(2))
    bucket.decode(sent, TURN, plain, sign=False)
    bucket.decode(sent, TURN, signs, sign=True)
    for tensor in tensors:
        assert torch.equal(signs[tensor], plain[tensor].sign())


@pytest.mark.parametrize("rule", ["mean", "contributors"])
def test_each_part_is_merged_by_itself(rule: str) -> None:
    tensors = drawn([(16, 16), (5,)], seed=0)
    of_nodes: list[list[Components]] = []
    updates: list[dict[Tensor, Tensor]] = []
    for node in range(3):
        bucket, residuals = one_bucket(tensors, DCTTopK(chunk_size=16, top_k=256), seed=10 + node)
        bucket.load(residuals)
        of_nodes.append(bucket.encode(TURN))
        updates.append(residuals)
    found = {tensor: torch.empty_like(tensor) for tensor in tensors}
    bucket.decode(merged(bucket.plan, of_nodes, rule), TURN, found, sign=False)
    for tensor in tensors:
        # All coefficients of all nodes: both rules are the mean of the momenta.
        expected = torch.stack([residuals[tensor] for residuals in updates]).mean(0)
        torch.testing.assert_close(found[tensor], expected, rtol=0, atol=1e-5)


def test_a_rank_without_elements_has_an_empty_message() -> None:
    tensors = [torch.zeros(0, 7), torch.zeros(0)]
    (plan,) = plans_for(tensors, DCTTopK())
    assert [matrix_view(shape) for shape in shapes_of(tensors)] == [(0, 7), (0, 1)]
    bucket = Bucket(plan, tensors, dict(zip(tensors, tensors, strict=True)))
    bucket.accumulate(dict(zip(tensors, tensors, strict=True)), 0.9, {})
    assert bucket.is_accumulated(dict(zip(tensors, tensors, strict=True)), 0.9, {})
    assert bucket.encode(TURN) == []
    assert pack(plan, []).numel() == 0
    bucket.settle([], TURN, {})
    bucket.decode([], TURN, {}, sign=True)


def test_full_sends_rounded_momenta_and_keeps_what_rounding_lost() -> None:
    momenta, updates, residuals = _after_exchange_alone(Full(), "bf16")
    for momentum, update, residual in zip(momenta, updates, residuals, strict=True):
        assert torch.equal(update, momentum.bfloat16().float())
        assert torch.equal(residual, momentum - update)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("replicator", [*REPLICATORS, DCTTopK(chunk_size=8, top_k=30)], ids=short_name)
def test_no_atomics_decide_over_the_bits_of_an_update(replicator: Replicator, value_format: str) -> None:
    """From the gradients of five nodes to the merged update; with 30 of 64 coefficients by the dense inverse."""
    tensors = drawn(SHAPES, 0)
    bucket, residuals = one_bucket(tensors, replicator, 1, value_format_name=value_format)
    updates = {tensor: torch.empty_like(tensor) for tensor in tensors}
    with NoAtomics():
        of_nodes = []
        for node in range(5):
            bucket.accumulate(dict(zip(tensors, drawn(SHAPES, node), strict=True)), 0.9, {})
            sent = bucket.encode(TURN)
            bucket.settle(sent, TURN, residuals)
            of_nodes.append(unpack(bucket.plan, pack(bucket.plan, sent)))
        bucket.decode(merged(bucket.plan, of_nodes, "contributors"), TURN, updates, sign=True)
