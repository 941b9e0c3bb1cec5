"""Messages of buckets between nodes in one process: who waits for what, and the same result everywhere."""

from __future__ import annotations

import pytest
import torch

from lightning_muon import Full, Replicator
from lightning_muon.flexdemo.node_exchange import Exchange
from lightning_muon.flexdemo.replicators import ExchangeStep
from tests.unit.flexdemo.cases import FORMATS, REPLICATORS, PostOffice, drawn, nodes_of, one_bucket, short_name

# Values of several segments, of one, and of less than one.
SHAPES: list[tuple[int, ...]] = [(40, 33), (127, 13), (5,), (3, 4), (1,)]
TURN = ExchangeStep(2, 0)


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> PostOffice:
    return PostOffice().take_over(monkeypatch)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("replicator", REPLICATORS, ids=short_name)
def test_all_nodes_get_the_mean_with_equal_bits(
    post: PostOffice, replicator: Replicator, num_nodes: int, value_format: str
) -> None:
    tensors = drawn(SHAPES, 0)
    buckets = [one_bucket(tensors, replicator, node, value_format=value_format)[0] for node in range(num_nodes)]
    exchanges = [Exchange(bucket, TURN, each) for bucket, each in zip(buckets, nodes_of(num_nodes), strict=True)]
    for each in exchanges:
        each.send_sums()
    found = [list(each.updates("mean", sign=False).values()) for each in exchanges]
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    own = [list(b.decode(b.encode(TURN), TURN, set(tensors), sign=False).values()) for b in buckets]
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
        assert Exchange(bucket, TURN, nodes).result("mean") == []
    assert not post.boxes
