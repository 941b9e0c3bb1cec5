"""Momenta into messages and back, against loops over blocks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, Full, Random, Replicator, Slicing, Striding
from lightning_muon.flexdemo.bucket import MomentumBucket, merged, pack, paired_views, unpack
from lightning_muon.flexdemo.bucket_plan import Part, Place, matrix_view
from lightning_muon.flexdemo.replicator import Components, ExchangeStep
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

TURN = ExchangeStep(3, 1)


def _after_exchange_alone(
    replicator: Replicator, value_format: str, seed: int = 0
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """(momenta that were accumulated, updates, residuals afterwards) of a node that merges with nobody."""
    tensors, gradients = drawn(SHAPES, seed), drawn(SHAPES, seed + 1)
    bucket, residuals = one_bucket(tensors, replicator, seed + 2, value_format_name=value_format)
    expected = [0.9 * residuals[tensor] + gradient for tensor, gradient in zip(tensors, gradients, strict=True)]
    bucket.accumulate(dict(zip(tensors, gradients, strict=True)), 0.9)
    sent = bucket.encode(TURN)
    bucket.settle(sent, TURN, residuals)
    updates = bucket.decode(merged(bucket.plan, [sent], "mean"), TURN, set(tensors), sign=False)
    return expected, [updates[t] for t in tensors], [residuals[t] for t in tensors]


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_what_is_sent_and_what_stays_are_the_momentum(replicator: Replicator, value_format: str) -> None:
    momenta, updates, residuals = _after_exchange_alone(replicator, value_format)
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
        indices = range(index * flat.numel() // period, (index + 1) * flat.numel() // period)
        assert is_sent.nonzero().flatten().tolist() == list(indices)
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
    bucket.accumulate(dict(zip(tensors, drawn(SHAPES, seed=2), strict=True)), 0.9)
    bucket.settle(bucket.encode(TURN), TURN, taking_part)
    for tensor in tensors:
        assert torch.equal(residuals[tensor], before[tensor]) == (tensor not in taking_part)
    bucket.settle(bucket.encode(TURN), TURN, {})
    updates = bucket.decode(bucket.encode(TURN), TURN, set(tensors[:2]), sign=False)
    assert updates.keys() == set(tensors[:2]) and all(update.isfinite().all() for update in updates.values())


def test_accumulating_again_begins_with_the_residual() -> None:
    tensors = drawn(SHAPES, seed=0)
    bucket, residuals = one_bucket(tensors, DCTTopK(chunk_size=8, top_k=64), seed=1)
    first, second = (dict(zip(tensors, drawn(SHAPES, seed), strict=True)) for seed in (2, 3))
    bucket.accumulate(first, 0.9)
    bucket.accumulate(second, 0.9)
    updates = bucket.decode(bucket.encode(TURN), TURN, set(tensors), sign=False)
    for tensor in tensors:
        expected = 0.9 * residuals[tensor] + second[tensor]
        torch.testing.assert_close(updates[tensor], expected, rtol=0, atol=1e-5)


def test_a_changed_gradient_or_decay_is_noticed() -> None:
    tensors = drawn(SHAPES, seed=0)
    bucket, residuals = one_bucket(tensors, DCTTopK(chunk_size=8, top_k=5), seed=1)
    gradients = dict(zip(tensors, drawn(SHAPES, seed=2), strict=True))
    bucket.accumulate(gradients, 0.9)
    assert bucket.is_accumulated(gradients, 0.9)
    assert not bucket.is_accumulated(gradients, 0.8)
    for tensor in tensors:
        gradients[tensor].view(-1)[-1] += 0.5
        assert not bucket.is_accumulated(gradients, 0.9)
        gradients[tensor].view(-1)[-1] -= 0.5
    residuals[tensors[1]][126, 12] += 1
    assert not bucket.is_accumulated(gradients, 0.9)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_a_message_brings_the_components_to_the_other_side(replicator: Replicator, value_format: str) -> None:
    tensors = drawn(SHAPES, seed=4)
    bucket, residuals = one_bucket(tensors, replicator, seed=5, value_format_name=value_format)
    bucket.load(residuals)
    sent = bucket.encode(TURN)
    for own, (values, indices) in zip(sent, unpack(bucket.plan, pack(bucket.plan, sent)), strict=True):
        # Rounding again may not change anything: what a node keeps is what the others get.
        assert torch.equal(values, own.values)
        assert (indices is None) == (own.indices is None)
        assert indices is None or torch.equal(indices, own.indices)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_what_is_sent_does_not_change_with_the_blocks(replicator: Replicator, value_format: str) -> None:
    tensors = drawn(SHAPES, seed=6)
    bucket, residuals = one_bucket(tensors, replicator, seed=7, value_format_name=value_format)
    bucket.load(residuals)
    sent = bucket.encode(TURN)
    before = [values.clone() for values, _ in sent]
    bucket.settle(sent, TURN, residuals)
    bucket.decode(sent, TURN, set(tensors), sign=False)
    bucket.accumulate(dict(zip(tensors, drawn(SHAPES, seed=8), strict=True)), 0.5)
    assert all(torch.equal(values, old) for (values, _), old in zip(sent, before, strict=True))


def test_signs_are_taken_of_the_decoded_update() -> None:
    tensors = drawn(SHAPES, seed=0)
    bucket, residuals = one_bucket(tensors, DCTTopK(chunk_size=8, top_k=5), seed=1)
    bucket.load(residuals)
    sent = bucket.encode(TURN)
    plain, signs = (bucket.decode(sent, TURN, set(tensors), sign=sign) for sign in (False, True))
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
    found = bucket.decode(merged(bucket.plan, of_nodes, rule), TURN, set(tensors), sign=False)
    for tensor in tensors:
        # All coefficients of all nodes: both rules are the mean of the momenta.
        expected = torch.stack([residuals[tensor] for residuals in updates]).mean(0)
        torch.testing.assert_close(found[tensor], expected, rtol=0, atol=1e-5)


def test_a_rank_without_elements_has_an_empty_message() -> None:
    tensors = [torch.zeros(0, 7), torch.zeros(0)]
    (plan,) = plans_for(tensors, DCTTopK())
    assert [matrix_view(shape) for shape in shapes_of(tensors)] == [(0, 7), (0, 1)]
    bucket = MomentumBucket(plan, tensors, dict(zip(tensors, tensors, strict=True)))
    bucket.accumulate(dict(zip(tensors, tensors, strict=True)), 0.9)
    assert bucket.is_accumulated(dict(zip(tensors, tensors, strict=True)), 0.9)
    assert bucket.encode(TURN) == []
    assert pack(plan, []).numel() == 0
    bucket.settle([], TURN, {})
    bucket.decode([], TURN, set(), sign=True)


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
    with NoAtomics():
        of_nodes = []
        for node in range(5):
            bucket.accumulate(dict(zip(tensors, drawn(SHAPES, node), strict=True)), 0.9)
            sent = bucket.encode(TURN)
            bucket.settle(sent, TURN, residuals)
            of_nodes.append(unpack(bucket.plan, pack(bucket.plan, sent)))
        bucket.decode(merged(bucket.plan, of_nodes, "contributors"), TURN, set(tensors), sign=True)


SQUARES = DCTTopK(chunk_size=8, top_k=5)


def _places(shapes: list[tuple[int, ...]], replicator: Replicator) -> list[tuple[Part, Place, Tensor]]:
    tensors = [torch.randn(shape) for shape in shapes]
    (plan,) = plans_for(tensors, replicator, dense_below=0)
    return [(part, place, tensors[place.number]) for part in plan.parts for place in part.places]


def _expected_batch(part: Part, place: Place, local: Tensor) -> Tensor:
    """The blocks, element by element; zeros where there is nothing of ``local``."""
    batch = torch.zeros(part.batch_shape)
    matrix = local.reshape(place.rows, place.cols).tolist()
    for row in range(place.rows):
        for col in range(place.cols):
            if len(part.block_shape) == 2:
                height, width = part.block_shape
                across = (place.cols + width - 1) // width
                block = place.first + (row // height) * across + col // width
                batch[block, row % height, col % width] = matrix[row][col]
            else:
                index = row * place.cols + col + place.first * (part.block_numel if part.block_shape else 1)
                batch[index // part.block_numel, index % part.block_numel] = matrix[row][col]
    return batch


@pytest.mark.parametrize("replicator", [SQUARES, DCTTopK(chunk_size=10, strips=True), Full()], ids=short_name)
def test_every_element_has_its_place_and_comes_back(replicator: Replicator) -> None:
    torch.manual_seed(0)
    for part, place, local in _places(SHAPES, replicator):
        batch, found = torch.zeros(part.batch_shape), torch.zeros_like(local)
        for in_batch, in_local in paired_views(part, place, batch, local):
            in_batch.copy_(in_local)
        assert torch.equal(batch, _expected_batch(part, place, local))
        for in_batch, in_found in paired_views(part, place, batch, found):
            in_found.add_(in_batch)
        assert torch.equal(found, local)


@pytest.mark.parametrize("rows", [1, 7, 8, 23])
@pytest.mark.parametrize("cols", [1, 8, 9, 23])
def test_blocks_at_the_edges_are_cut(rows: int, cols: int) -> None:
    torch.manual_seed(2)
    ((part, place, local),) = _places([(rows, cols)], SQUARES)
    batch = torch.full(part.batch_shape, float("nan"))
    for into, source in paired_views(part, place, batch, local):
        into.copy_(source)
    filled = ~batch.isnan()
    assert filled.sum() == local.numel()
    assert torch.equal(batch.nan_to_num(0.0), _expected_batch(part, place, local))
