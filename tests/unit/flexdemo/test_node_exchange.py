"""Messages of buckets between nodes in one process: who waits for what, and the same result everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_muon import Full, Replicator, Striding
from lightning_muon.flexdemo.bucket import MomentumBucket
from lightning_muon.flexdemo.bucket_plan import BucketPlan
from lightning_muon.flexdemo.node_exchange import Exchange, NodeGroups
from lightning_muon.flexdemo.replicators import Components, ExchangeStep
from tests.unit.flexdemo.cases import FORMATS, REPLICATORS, PostOffice, drawn, nodes_of, one_bucket, short_name

# Values of several segments, of one, and of less than one.
SHAPES: list[tuple[int, ...]] = [(40, 33), (127, 13), (5,), (3, 4), (1,)]
TURN = ExchangeStep(2, 0)


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> PostOffice:
    return PostOffice().take_over(monkeypatch)


def _components(
    replicator: Replicator, num_nodes: int, value_format: str = "fp32", seed: int = 0
) -> tuple[list[MomentumBucket], list[list[Components]]]:
    """The same bucket on all nodes, with momenta of their own, and what they send."""
    tensors = drawn(SHAPES, seed)
    buckets = [
        one_bucket(tensors, replicator, 100 * seed + node, value_format=value_format)[0] for node in range(num_nodes)
    ]
    return buckets, [bucket.encode(TURN) for bucket in buckets]


def _started(
    buckets: Sequence[MomentumBucket], sent: Sequence[list[Components]], nodes: Sequence[NodeGroups]
) -> list[Exchange]:
    return [Exchange(b.plan, own, each) for b, own, each in zip(buckets, sent, nodes, strict=True)]


def _decoded(bucket: MomentumBucket, components: Sequence[Components]) -> list[Tensor]:
    return list(bucket.decode(components, TURN, set(bucket.parameters), sign=False).values())


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_all_nodes_get_the_mean_with_equal_bits(
    post: PostOffice, replicator: Replicator, num_nodes: int, value_format: str
) -> None:
    buckets, sent = _components(replicator, num_nodes, value_format)
    exchanges = _started(buckets, sent, nodes_of(num_nodes))
    for each in exchanges:
        each.groups.send_sums_until(each)
    found = [_decoded(buckets[0], each.result("mean")) for each in exchanges]
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    own = [_decoded(buckets[0], components) for components in sent]
    for index, update in enumerate(found[0]):
        expected = sum((node[index].double() for node in own), torch.zeros(())) / num_nodes
        is_rounded = num_nodes > 2 and not replicator.sends_indices and value_format != "fp32"
        if is_rounded and isinstance(replicator, Full):
            assert torch.equal(update, update.bfloat16().float()), "sums travel in bfloat16"
        # bfloat16 has 8 bits: 2^-9 of numbers of size 4. Else float32, and a transform.
        torch.testing.assert_close(update.double(), expected, rtol=0, atol=0.01 if is_rounded else 1e-5)
    assert all(not box for box in post.boxes.values())


def test_a_sum_is_sent_when_its_summands_have_arrived(post: PostOffice) -> None:
    buckets, sent = _components(Striding(rate=0.5), 3)
    nodes = nodes_of(3)
    first = [Exchange(buckets[n].plan, sent[n], nodes[n]) for n in (0, 1)]
    nodes[0].send_sums(step=0)
    assert list(nodes[0].waiting) == [first[0]]
    assert not [box for box in post.boxes if box[0] == "back"]
    Exchange(buckets[2].plan, sent[2], nodes[2])
    nodes[0].send_sums(step=0)
    assert not nodes[0].waiting
    assert {box[2] for box in post.boxes if box[:2] == ("back", 0)} == {1, 2}


def test_the_sums_of_a_later_step_stay_until_it_comes(post: PostOffice) -> None:
    buckets, sent = _components(Full(), 3)
    nodes = nodes_of(3)
    for bucket, own, each in zip(buckets, sent, nodes, strict=True):
        Exchange(bucket.plan, own, each, due=5)
    nodes[0].send_sums(step=4)
    assert len(nodes[0].waiting) == 1
    nodes[0].send_sums(step=5)
    assert not nodes[0].waiting


def test_sums_are_sent_in_the_order_of_the_exchanges(post: PostOffice) -> None:
    nodes = nodes_of(3)
    of_buckets = [_started(*_components(Full(), 3, seed=seed), nodes) for seed in (1, 2, 3)]
    # Node 0 wants the second one, node 1 the last one, node 2 waits for none.
    nodes[0].send_sums_until(of_buckets[1][0])
    nodes[1].send_sums_until(of_buckets[2][1])
    nodes[2].send_sums(step=0)
    assert list(nodes[0].waiting) == [of_buckets[2][0]]
    assert not nodes[1].waiting
    nodes[0].send_sums_until(of_buckets[2][0])
    for number, exchanges in enumerate(of_buckets):
        found = [each.result("mean") for each in exchanges]
        _, sent = _components(Full(), 3, seed=number + 1)
        expected = torch.stack([own[0].values for own in sent]).mean(0)
        for components in found:
            torch.testing.assert_close(components[0].values, expected, rtol=0, atol=1e-6)


def test_an_exchange_of_nothing_sends_nothing(post: PostOffice) -> None:
    for nodes in nodes_of(3):
        assert Exchange(BucketPlan((0,), ()), [], nodes).result("mean") == []
        assert not nodes.waiting
    assert not post.boxes
