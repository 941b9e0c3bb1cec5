"""Momenta into messages and back, against loops over blocks, and between nodes that one process plays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, Full, Replicator
from lightning_muon.flexdemo.bucket import Exchange, MomentumBucket, merge, merged, pack, paired_views, unpack
from lightning_muon.flexdemo.bucket_plan import MessagePart, Place
from lightning_muon.flexdemo.replicators import Components, ExchangeStep
from tests.support.atomics import NoAtomics
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

TURN = ExchangeStep(3, 1)
SQUARES = DCTTopK(chunk_size=8, top_k=5)


def _of(tensors: list[Tensor], seed: int) -> dict[Tensor, Tensor]:
    return dict(zip(tensors, drawn([tuple(tensor.shape) for tensor in tensors], seed), strict=True))


def _equal(found: list[Components], expected: list[Components]) -> None:
    for (values, indices), (own_values, own_indices) in zip(found, expected, strict=True):
        assert torch.equal(values, own_values)
        assert (indices is None) == (own_indices is None)
        assert indices is None or torch.equal(indices, own_indices)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_what_is_sent_and_what_stays_are_the_momentum(replicator: Replicator, value_format: str) -> None:
    tensors = drawn(SHAPES, 0)
    bucket, residuals = one_bucket(tensors, replicator, 2, value_format=value_format)
    gradients = _of(tensors, 1)
    momenta = {tensor: 0.9 * residuals[tensor] + gradients[tensor] for tensor in tensors}
    bucket.accumulate(gradients, 0.9)
    sent = bucket.encode(TURN)
    before = [part._replace(values=part.values.clone()) for part in sent]
    # Rounding again may not change anything: what a node keeps is what the others get.
    message = pack(bucket.plan, sent)
    assert message.numel() == bucket.plan.message_bytes()
    _equal(unpack(bucket.plan, message), sent)
    bucket.subtract_sent(sent, TURN, residuals)
    updates = bucket.decode(merged(bucket.plan, [sent], "mean"), TURN, set(tensors), sign=False)
    for tensor in tensors:
        # Some roundings of numbers of size 5, and of a transform of 16 to 64 of them.
        torch.testing.assert_close(updates[tensor] + residuals[tensor], momenta[tensor], rtol=0, atol=1e-5)
    bucket.accumulate(_of(tensors, 8), 0.5)
    _equal(sent, before)  # What is on its way does not change with the blocks.


@pytest.mark.parametrize("replicator", [SQUARES, Full()], ids=short_name)
def test_parameters_that_do_not_take_part_keep_their_residual(replicator: Replicator) -> None:
    tensors = drawn(SHAPES, seed=0)
    bucket, residuals = one_bucket(tensors, replicator, seed=1)
    before = {tensor: residual.clone() for tensor, residual in residuals.items()}
    taking_part = set(tensors[1::2])
    bucket.accumulate(_of(tensors, 2), 0.9)
    sent = bucket.encode(TURN)
    bucket.subtract_sent(sent, TURN, taking_part)
    for tensor in tensors:
        assert torch.equal(residuals[tensor], before[tensor]) == (tensor not in taking_part)
    updates = bucket.decode(sent, TURN, taking_part, sign=False)
    assert updates.keys() == taking_part and all(update.isfinite().all() for update in updates.values())


def test_a_changed_gradient_decay_or_residual_is_noticed() -> None:
    tensors = drawn(SHAPES, seed=0)
    bucket, residuals = one_bucket(tensors, SQUARES, seed=1)
    gradients = _of(tensors, 2)
    bucket.accumulate(_of(tensors, 3), 0.9)
    assert not bucket.is_accumulated(gradients, 0.9)
    bucket.accumulate(gradients, 0.9)
    assert bucket.is_accumulated(gradients, 0.9)
    assert not bucket.is_accumulated(gradients, 0.8)
    for tensor in tensors:
        gradients[tensor].view(-1)[-1] += 0.5
        assert not bucket.is_accumulated(gradients, 0.9)
        gradients[tensor].view(-1)[-1] -= 0.5
    residuals[tensors[1]][126, 12] += 1
    assert not bucket.is_accumulated(gradients, 0.9)


def test_signs_are_those_of_the_update_and_keep_a_nan() -> None:
    tensors = drawn(SHAPES, seed=0)
    bucket, residuals = one_bucket(tensors, SQUARES, seed=1)
    plain, signs = (bucket.decode(bucket.encode(TURN), TURN, set(tensors), sign=sign) for sign in (False, True))
    for tensor in tensors:
        assert torch.equal(signs[tensor], plain[tensor].sign())
    residuals[tensors[6]][1] = torch.nan  # Which travels dense.
    bucket.load()
    assert bucket.decode(bucket.encode(TURN), TURN, set(tensors), sign=True)[tensors[6]].isnan().any()


def test_a_rank_without_elements_has_an_empty_bucket() -> None:
    tensors = [torch.zeros(0, 7), torch.zeros(0)]
    (plan,) = plans_for(tensors, DCTTopK())
    bucket = MomentumBucket(plan, tensors, dict(zip(tensors, tensors, strict=True)))
    bucket.accumulate(dict(zip(tensors, tensors, strict=True)), 0.9)
    assert bucket.is_accumulated(dict(zip(tensors, tensors, strict=True)), 0.9)
    assert bucket.encode(TURN) == []
    bucket.subtract_sent([], TURN, {})
    assert all(not update.numel() for update in bucket.decode([], TURN, set(tensors), sign=True).values())


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("replicator", [*REPLICATORS, DCTTopK(chunk_size=8, top_k=30)], ids=short_name)
def test_no_atomics_decide_over_the_bits_of_an_update(replicator: Replicator, value_format: str) -> None:
    """From the gradients of five nodes to the merged update; with 30 of 64 coefficients by the dense inverse."""
    tensors = drawn(SHAPES, 0)
    bucket, residuals = one_bucket(tensors, replicator, 1, value_format=value_format)
    with NoAtomics():
        of_nodes = []
        for node in range(5):
            bucket.accumulate(_of(tensors, node), 0.9)
            sent = bucket.encode(TURN)
            bucket.subtract_sent(sent, TURN, residuals)
            of_nodes.append(unpack(bucket.plan, pack(bucket.plan, sent)))
        bucket.decode(merged(bucket.plan, of_nodes, "contributors"), TURN, set(tensors), sign=True)


def _expected_batch(part: MessagePart, place: Place, local: Tensor) -> Tensor:
    """The blocks, element by element; NaN where there is nothing of ``local``."""
    batch = torch.full(part.batch_shape, torch.nan)
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
    tensors = drawn([*SHAPES, (7, 8), (8, 23), (23, 9)], seed=0)
    (plan,) = plans_for(tensors, replicator, dense_below=0)
    for part, place in [(each, place) for each in plan.parts for place in each.places]:
        local = tensors[place.number]
        batch, found = torch.full(part.batch_shape, torch.nan), torch.zeros_like(local)
        for in_batch, in_local in paired_views(part, place, batch, local):
            in_batch.copy_(in_local)
        torch.testing.assert_close(batch, _expected_batch(part, place, local), rtol=0, atol=0, equal_nan=True)
        for in_batch, in_found in paired_views(part, place, batch, found):
            in_found.add_(in_batch)
        assert torch.equal(found, local)


def test_a_zero_is_no_contribution() -> None:
    nodes = [
        Components(torch.tensor([[1.0, 0.0, 4.0]]), torch.tensor([[6, 3, 1]])),
        Components(torch.tensor([[8.0, 16.0, 0.0]]), torch.tensor([[2, 6, 1]])),
    ]
    assert merge(nodes, "contributors", 7).values.tolist() == [[8.5, 0.0, 4.0, 8.0, 0.0, 0.0]]
    assert merge(nodes, "mean", 7).values.tolist() == [[8.5, 0.0, 2.0, 4.0, 0.0, 0.0]]


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


# Values of several segments, of one, and of less than one.
SEGMENTS: list[tuple[int, ...]] = [(40, 33), (127, 13), (5,), (3, 4), (1,)]
EXCHANGE = ExchangeStep(2, 0)


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> PostOffice:
    return PostOffice().take_over(monkeypatch)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_all_nodes_get_the_mean_with_equal_bits(
    post: PostOffice, replicator: Replicator, num_nodes: int, value_format: str
) -> None:
    tensors = drawn(SEGMENTS, 0)
    buckets = [one_bucket(tensors, replicator, node, value_format=value_format)[0] for node in range(num_nodes)]
    exchanges = [Exchange(bucket, EXCHANGE, each) for bucket, each in zip(buckets, nodes_of(num_nodes), strict=True)]
    for each in exchanges:
        each.send_sums()
    found = [list(each.updates("mean", sign=False).values()) for each in exchanges]
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    own = [list(b.decode(b.encode(EXCHANGE), EXCHANGE, set(tensors), sign=False).values()) for b in buckets]
    for index, update in enumerate(found[0]):
        expected = sum((node[index].double() for node in own), torch.zeros(())) / num_nodes
        is_rounded = num_nodes > 2 and not replicator.sends_indices and value_format != "fp32"
        if is_rounded and isinstance(replicator, Full):
            assert torch.equal(update, update.bfloat16().float()), "sums travel in bfloat16"
        # bfloat16 has 8 bits: 2^-9 of numbers of size 4. Else float32, and a transform.
        torch.testing.assert_close(update.double(), expected, rtol=0, atol=0.01 if is_rounded else 1e-5)
    assert all(not box for box in post.boxes.values())


def test_an_exchange_of_nothing_sends_nothing(post: PostOffice) -> None:
    bucket, _ = one_bucket([torch.zeros(0, 7)], Full(), 0)
    for nodes in nodes_of(3):
        assert Exchange(bucket, EXCHANGE, nodes).result("mean") == []
    assert not post.boxes
