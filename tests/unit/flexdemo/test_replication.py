"""The exchange of all buckets: what is early, who takes part, and updates that are waited for when they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import DCTTopK, Replicator, Striding
from lightning_muon.comm.groups import ALONE
from lightning_muon.flexdemo import node_exchange
from lightning_muon.flexdemo.bucket import Bucket
from lightning_muon.flexdemo.momentum_sync import EarlyExchanges, Replication, Rules, Updates
from lightning_muon.flexdemo.node_exchange import Nodes
from tests.unit.flexdemo.cases import PostOffice, drawn, nodes_of, plans_for, short_name

SHAPES: list[tuple[int, ...]] = [(13, 7), (20, 11), (5,), (9, 9)]
RULES = Rules(decay=0.9, merge="mean", sign=False)
ALL = DCTTopK(chunk_size=8, top_k=64)


def _replication(
    tensors: Sequence[Tensor],
    *,
    replicator: Replicator = ALL,
    nodes: Nodes | None = None,
    rules: Rules = RULES,
    scales: Mapping[Tensor, float] | None = None,
) -> tuple[Replication, dict[Tensor, Tensor]]:
    """Several buckets, and residuals of zero."""
    residuals = {tensor: torch.zeros(tensor.shape) for tensor in tensors}
    buckets = [Bucket(plan, tensors, residuals) for plan in plans_for(tensors, replicator, chunk_bytes=700)]
    assert len(buckets) == 3
    replication = Replication(buckets, nodes or Nodes(ALONE, ALONE), rules, lambda: scales or {})
    return replication, residuals


def _gradients(tensors: Sequence[Tensor], seed: int) -> dict[Tensor, Tensor]:
    return dict(zip(tensors, drawn(SHAPES, seed), strict=True))


def _numbers(some: Iterable[Tensor], tensors: Sequence[Tensor]) -> list[int]:
    return [next(number for number, tensor in enumerate(tensors) if tensor is one) for one in some]


def test_updates_are_the_momenta_where_everything_is_sent() -> None:
    tensors = drawn(SHAPES, 0)
    replication, residuals = _replication(tensors, scales={tensors[1]: 0.5})
    for step in range(2):
        gradients = _gradients(tensors, 1 + step)
        updates = Updates(replication.run(gradients, ()), RULES)
        for number, tensor in enumerate(tensors):
            scaled = gradients[tensor] * (0.5 if number == 1 else 1.0)
            torch.testing.assert_close(updates[tensor], scaled, rtol=0, atol=1e-5)
            assert residuals[tensor].abs().max() < 1e-5


def test_only_parameters_that_take_part_have_updates_and_lose_momentum() -> None:
    tensors = drawn(SHAPES, 0)
    replication, residuals = _replication(tensors)
    for residual in residuals.values():
        residual.fill_(1.0)
    gradients = _gradients(tensors, 1)
    for absent in (tensors[1], tensors[2]):
        del gradients[absent]
    in_flight = replication.run(gradients, ())
    assert [_numbers(one.taking_part, tensors) for one in in_flight] == [[3], [0]]
    updates = Updates(in_flight, RULES)
    for tensor in tensors:
        assert (tensor in updates) == (tensor in gradients)
        assert torch.equal(residuals[tensor], torch.ones(tensor.shape)) == (tensor not in gradients)
    with pytest.raises(KeyError):
        updates[tensors[1]]


def test_what_is_on_its_way_is_not_sent_again_and_changes_no_momentum() -> None:
    tensors = drawn(SHAPES, 0)
    replication, residuals = _replication(tensors)
    gradients = _gradients(tensors, 1)
    assert [_numbers(each.parameters, tensors) for each in replication.buckets.values()] == [[3, 2], [1], [0]]
    replication.start_early("0", gradients)
    replication.start_early("1", gradients)
    assert all((residual == 0).all() for residual in residuals.values())
    assert not replication.differs("0", gradients)
    changed = {tensor: 2 * gradient for tensor, gradient in gradients.items()}
    assert replication.differs("0", changed)
    replication.drop("1")
    updates = Updates(replication.run(changed, ("0",)), RULES)
    for number, tensor in enumerate(tensors):
        # The caller answers for what it says is sent: bucket 0 has the gradients from before.
        expected = gradients[tensor] if number > 1 else changed[tensor]
        torch.testing.assert_close(updates[tensor], expected, rtol=0, atol=1e-5)


def test_updates_are_received_bucket_by_bucket_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [tensor.bfloat16() for tensor in drawn(SHAPES, 0)]
    replication, _ = _replication(tensors)
    received: list[str] = []
    result = node_exchange.Exchange.result
    replaced = lambda self, rule: received.append(rule) or result(self, rule)  # noqa: E731
    monkeypatch.setattr(node_exchange.Exchange, "result", replaced)
    ready = torch.full((2,), 7.0)
    own = torch.zeros(2)
    updates = Updates(replication.run(_gradients(tensors, 1), ()), RULES, {own: ready})
    assert all(tensor in updates for tensor in (*tensors, own))
    assert torch.equal(updates[own], ready)
    assert received == []
    assert updates[tensors[3]].dtype == torch.bfloat16
    assert updates[tensors[2]].shape == (5,)
    assert received == ["mean"]
    assert updates[tensors[0]].shape == (13, 7)
    assert received == ["mean"] * 3


def test_signs_are_those_of_the_merged_update() -> None:
    tensors = drawn(SHAPES, 0)
    rules = Rules(decay=0.9, merge="mean", sign=True)
    replication, _ = _replication(tensors, rules=rules)
    gradients = _gradients(tensors, 1)
    updates = Updates(replication.run(gradients, ()), rules)
    for tensor in tensors:
        assert torch.equal(updates[tensor], gradients[tensor].sign())


@pytest.mark.parametrize("replicator", [ALL, Striding(rate=1.0)], ids=short_name)
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_nodes_get_the_mean_also_where_only_one_has_sent_early(
    monkeypatch: pytest.MonkeyPatch, replicator: Replicator, num_nodes: int
) -> None:
    PostOffice().take_over(monkeypatch)
    of_nodes = nodes_of(num_nodes)
    tensors = drawn(SHAPES, 0)
    replications = [_replication(tensors, replicator=replicator, nodes=each)[0] for each in of_nodes]
    gradients = [_gradients(tensors, 1 + node) for node in range(num_nodes)]
    replications[0].start("0", gradients[0])
    in_flight = [each.run(g, ("0",) if n == 0 else ()) for n, (each, g) in
                 enumerate(zip(replications, gradients, strict=True))]  # fmt: skip
    for each in of_nodes:
        while each.waiting:
            each.send_until(each.waiting[-1])
    # Sums travel in float32 with value_format_name="fp32".
    for updates in [Updates(one, RULES) for one in in_flight]:
        for tensor in tensors:
            expected = torch.stack([node[tensor] for node in gradients]).mean(0)
            torch.testing.assert_close(updates[tensor], expected, rtol=0, atol=1e-5)


def test_random_positions_move_on_with_the_step_and_differ_between_buckets() -> None:
    tensors = drawn(SHAPES, 0)
    replication, _ = _replication(tensors, replicator=Striding(rate=0.5))
    gradients = {tensor: torch.ones(tensor.shape) for tensor in tensors}
    first = Updates(replication.run(gradients, ()), RULES)
    replication.step = 1
    second = Updates(replication.run(gradients, ()), RULES)
    for tensor in (tensors[0], tensors[1]):
        assert (first[tensor].flatten()[::2] == 1).all()
        assert (first[tensor].flatten()[1::2] == 0).all()
        assert (second[tensor].flatten()[::2] == 0).all()
        # 0.9 * 1 + 1 of what was left over.
        assert torch.allclose(second[tensor].flatten()[1::2], torch.tensor(1.9))


def test_a_bucket_is_sent_when_backward_has_all_of_its_gradients() -> None:
    first, second = nn.Parameter(torch.randn(13, 7)), nn.Parameter(torch.randn(20, 11))
    third, last = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(9, 9))
    tensors = [first, second, third, last]
    replication, _ = _replication(tensors)
    early = EarlyExchanges(replication, {tensor: f"p{number}" for number, tensor in enumerate(tensors)})
    (second * 2).sum().backward()
    last.sum().backward()
    assert not any(early.is_sent(key) for key in replication.buckets)
    third.sum().backward()
    assert [early.is_sent(key) for key in replication.buckets] == [True, True, False]
    gradients = {tensor: torch.ones(tensor.shape) for tensor in tensors}
    gradients[second] *= 2
    assert not early.differs("1", gradients)
    assert early.differs("1", gradients | {second: gradients[first].new_ones(second.shape)})
    early.settle(["0", "1"], ["1"], gradients)
    updates = Updates(replication.run(gradients, ["0"]), RULES)
    for tensor in tensors:
        torch.testing.assert_close(updates[tensor], gradients[tensor], rtol=0, atol=1e-5)
