"""The exchange of all buckets: what is early, who takes part, and updates that are waited for when they are needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon import DCTTopK, FlexDeMoConfig, Full, Replicator, Striding
from lightning_muon.comm.groups import ALONE
from lightning_muon.flexdemo.bucket import MomentumBucket
from lightning_muon.flexdemo.inter_node_sync import Trained
from lightning_muon.flexdemo.momentum_sync import BucketExchanges, EarlyExchanges, InFlight, MomentumSync, Updates
from lightning_muon.flexdemo.node_exchange import NodeGroups
from lightning_muon.optim.backward_prefetch import filled
from lightning_muon.optim.executor import HostExecutor
from lightning_muon.schedule.program import EARLY_EXCHANGE, IN_STEP, runs
from tests.support.processes import ProcessPool
from tests.unit.flexdemo.cases import PostOffice, drawn, nodes_of, plans_for, short_name

SHAPES: list[tuple[int, ...]] = [(13, 7), (20, 11), (5,), (9, 9)]
CONFIG = FlexDeMoConfig(decay=0.9, merge="mean", sign=False)
ALL = DCTTopK(chunk_size=8, top_k=64)


def _bucket_exchanges(
    tensors: Sequence[Tensor],
    *,
    replicator: Replicator = ALL,
    nodes: NodeGroups | None = None,
) -> tuple[BucketExchanges, dict[Tensor, Tensor]]:
    """Several buckets, and residuals of zero."""
    residuals = {tensor: torch.zeros(tensor.shape) for tensor in tensors}
    buckets = [MomentumBucket(plan, tensors, residuals) for plan in plans_for(tensors, replicator, chunk_bytes=700)]
    assert len(buckets) == 3
    exchanges = BucketExchanges(buckets, nodes or NodeGroups(ALONE, ALONE), CONFIG)
    return exchanges, residuals


def _gradients(tensors: Sequence[Tensor], seed: int) -> dict[Tensor, Tensor]:
    return dict(zip(tensors, drawn(SHAPES, seed), strict=True))


def _sent(exchanges: BucketExchanges, gradients: Mapping[Tensor, Tensor], sent: Sequence[str] = ()) -> list[InFlight]:
    """What the ops encode, exchange and settle of a step do."""
    in_flight: list[InFlight] = []
    for key, bucket in exchanges.buckets.items():
        taking_part = frozenset(tensor for tensor in bucket.parameters if tensor in gradients)
        if not taking_part:
            continue
        if key not in sent:
            exchanges.encode(key, filled(bucket.parameters, dict(gradients)))
            exchanges.send(key)
        in_flight.append(exchanges.settle(key, taking_part))
    return in_flight


def _received(in_flight: Sequence[InFlight], late: Mapping[Tensor, Tensor] | None = None) -> Updates:
    """What the ops decode do."""
    updates = Updates({tensor for one in in_flight for tensor in one.taking_part}, CONFIG, late)
    for one in in_flight:
        updates.receive(one)
    return updates


def _numbers(some: Iterable[Tensor], tensors: Sequence[Tensor]) -> list[int]:
    return [next(number for number, tensor in enumerate(tensors) if tensor is one) for one in some]


def test_updates_are_the_momenta_where_everything_is_sent() -> None:
    tensors = drawn(SHAPES, 0)
    exchanges, residuals = _bucket_exchanges(tensors)
    for step in range(2):
        gradients = _gradients(tensors, 1 + step)
        updates = _received(_sent(exchanges, gradients))
        for tensor in tensors:
            torch.testing.assert_close(updates[tensor], gradients[tensor], rtol=0, atol=1e-5)
            assert residuals[tensor].abs().max() < 1e-5


def test_only_parameters_that_take_part_are_updated() -> None:
    tensors = drawn(SHAPES, 0)
    exchanges, residuals = _bucket_exchanges(tensors)
    for residual in residuals.values():
        residual.fill_(1.0)
    gradients = _gradients(tensors, 1)
    for absent in (tensors[1], tensors[2]):
        del gradients[absent]
    in_flight = _sent(exchanges, gradients)
    assert [_numbers(one.taking_part, tensors) for one in in_flight] == [[3], [0]]
    updates = _received(in_flight)
    for tensor in tensors:
        assert (tensor in updates) == (tensor in gradients)
        assert torch.equal(residuals[tensor], torch.ones(tensor.shape)) == (tensor not in gradients)
    with pytest.raises(KeyError):
        updates[tensors[1]]


def test_what_is_on_its_way_is_not_sent_again() -> None:
    tensors = drawn(SHAPES, 0)
    exchanges, residuals = _bucket_exchanges(tensors)
    gradients = _gradients(tensors, 1)
    assert [_numbers(each.parameters, tensors) for each in exchanges.buckets.values()] == [[3, 2], [1], [0]]
    exchanges.start_early("n0", gradients)
    exchanges.start_early("n1", gradients)
    assert all((residual == 0).all() for residual in residuals.values())
    assert not exchanges.differs("n0", gradients)
    changed = {tensor: 2 * gradient for tensor, gradient in gradients.items()}
    assert exchanges.differs("n0", changed)
    exchanges.drop("n1")
    updates = _received(_sent(exchanges, changed, ["n0"]))
    for number, tensor in enumerate(tensors):
        # The caller answers for what it says is sent: bucket 0 has the gradients from before.
        expected = gradients[tensor] if number > 1 else changed[tensor]
        torch.testing.assert_close(updates[tensor], expected, rtol=0, atol=1e-5)


def test_updates_are_promised_before_they_are_decoded() -> None:
    tensors = [tensor.bfloat16() for tensor in drawn(SHAPES, 0)]
    exchanges, _ = _bucket_exchanges(tensors)
    ready, own = torch.full((2,), 7.0), torch.zeros(2)
    in_flight = _sent(exchanges, _gradients(tensors, 1))
    updates = Updates(set(tensors), CONFIG, {own: ready, tensors[2]: torch.ones(5)})
    assert all(tensor in updates for tensor in (*tensors, own)) and updates.keys() == {own}
    updates.receive(in_flight[0])
    assert updates.keys() == {own, tensors[3], tensors[2]}
    assert updates[tensors[3]].dtype == torch.bfloat16
    torch.testing.assert_close(updates[tensors[2]], (_gradients(tensors, 1)[tensors[2]] + 1).bfloat16())


@pytest.mark.parametrize("replicator", [ALL, Striding(rate=1.0)], ids=short_name)
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_nodes_get_the_mean_if_only_one_has_sent_early(
    monkeypatch: pytest.MonkeyPatch, replicator: Replicator, num_nodes: int
) -> None:
    PostOffice().take_over(monkeypatch)
    of_nodes = nodes_of(num_nodes)
    tensors = drawn(SHAPES, 0)
    of_ranks = [_bucket_exchanges(tensors, replicator=replicator, nodes=each)[0] for each in of_nodes]
    gradients = [_gradients(tensors, 1 + node) for node in range(num_nodes)]
    of_ranks[0].start_early("n0", gradients[0])
    in_flight = [
        _sent(each, of_node, ["n0"] if node == 0 else [])
        for node, (each, of_node) in enumerate(zip(of_ranks, gradients, strict=True))
    ]
    for each in of_nodes:
        while each.waiting:
            each.send_sums_until(each.waiting[-1])
    # Sums travel in float32 with value_format_name="fp32".
    for updates in [_received(one) for one in in_flight]:
        for tensor in tensors:
            expected = torch.stack([node[tensor] for node in gradients]).mean(0)
            torch.testing.assert_close(updates[tensor], expected, rtol=0, atol=1e-5)


def test_strides_move_on_with_the_step() -> None:
    tensors = drawn(SHAPES, 0)
    exchanges, _ = _bucket_exchanges(tensors, replicator=Striding(rate=0.5))
    gradients = {tensor: torch.ones(tensor.shape) for tensor in tensors}
    first = _received(_sent(exchanges, gradients))
    exchanges.step = 1
    second = _received(_sent(exchanges, gradients))
    for tensor in (tensors[0], tensors[1]):
        assert (first[tensor].flatten()[::2] == 1).all()
        assert (first[tensor].flatten()[1::2] == 0).all()
        assert (second[tensor].flatten()[::2] == 0).all()
        # 0.9 * 1 + 1 of what was left over.
        assert torch.allclose(second[tensor].flatten()[1::2], torch.tensor(1.9))


def test_a_bucket_leaves_when_its_gradients_are_there() -> None:
    first, second = nn.Parameter(torch.randn(13, 7)), nn.Parameter(torch.randn(20, 11))
    third, last = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(9, 9))
    tensors = [first, second, third, last]
    exchanges, _ = _bucket_exchanges(tensors)
    early = EarlyExchanges(exchanges, {tensor: f"p{number}" for number, tensor in enumerate(tensors)})
    early.run_on(HostExecutor({EARLY_EXCHANGE: early.run}))
    (second * 2).sum().backward()
    last.sum().backward()
    assert not any(early.is_sent(key) for key in exchanges.buckets)
    third.sum().backward()
    assert [early.is_sent(key) for key in exchanges.buckets] == [True, True, False]
    gradients = {tensor: torch.ones(tensor.shape) for tensor in tensors}
    gradients[second] *= 2
    assert not early.differs("n1", gradients)
    assert early.differs("n1", gradients | {second: gradients[first].new_ones(second.shape)})
    early.settle(["n0", "n1"], ["n1"], gradients)
    updates = _received(_sent(exchanges, gradients, ["n0"]))
    for tensor in tensors:
        torch.testing.assert_close(updates[tensor], gradients[tensor], rtol=0, atol=1e-5)


SYNC_SHAPES = [(13, 7), (5,), (9, 9)]


def _sync(mesh: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[MomentumSync, Trained]:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SYNC_SHAPES]
    states: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    config = FlexDeMoConfig(**({"sign": False, "dense_below": 10, "value_format": "fp32"} | options))
    sync = MomentumSync(config, mesh)
    for parameter in parameters:
        sync.init_state(parameter, states[parameter])
    return sync, Trained(parameters, states)


def _drawn_gradients(parameters: Sequence[Tensor], seed: int) -> dict[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p: torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters}


@pytest.mark.parametrize("delay", [0, 1])
def test_state_is_float32_whatever_the_parameters_are(delay: int) -> None:
    sync, trained = _sync(dtype=torch.bfloat16, delay=delay)
    parameters, states = trained.parameters, trained.states
    for parameter in parameters:
        state = states[parameter]
        assert set(state) == {"residual"} | ({"delayed_update", "has_delayed_update"} if delay else set())
        assert state["residual"].dtype == torch.float32
        assert state["residual"].shape == (1, *parameter.shape)
        if delay:
            assert (state["delayed_update"].dtype, state["delayed_update"].shape) == (torch.float32, parameter.shape)
            assert state["has_delayed_update"] == 0
        residual = state["residual"]
        sync.init_state(parameter, states[parameter])
        assert states[parameter]["residual"] is residual, "state was made anew"


def test_one_node_applies_its_gradients_and_sends_nothing() -> None:
    for sign in (False, True):
        sync, trained = _sync(sign=sign)
        parameters = trained.parameters
        gradients = _drawn_gradients(parameters[:2], 1)
        assert sync.plan(trained, {}, 0) is None
        updates = sync.updates(trained, gradients)
        assert set(updates) == set(parameters[:2])
        for parameter in parameters[:2]:
            expected = gradients[parameter].sign() if sign else gradients[parameter]
            assert torch.equal(updates[parameter], expected)
        assert sync.sent_bytes(parameters) == 0
        assert sync.order == []


def test_one_node_applies_the_residuals_that_it_takes_over_once() -> None:
    sync, trained = _sync(decay=0.5)
    parameters, states = trained.parameters, trained.states
    saved = {p: torch.randn(3, *p.shape) for p in parameters}
    for parameter in parameters:
        sync.load(parameter, states[parameter], {"residual": saved[parameter]})
        torch.testing.assert_close(states[parameter]["residual"][0], saved[parameter].sum(0))
    for step in range(2):
        gradients = _drawn_gradients(parameters, step)
        updates = sync.updates(trained, gradients)
        for parameter in parameters:
            left = 0.5 * saved[parameter].sum(0) if step == 0 else 0.0
            torch.testing.assert_close(updates[parameter], gradients[parameter] + left)


def test_what_was_not_saved_stays() -> None:
    sync, trained = _sync(delay=1)
    parameters, states = trained.parameters, trained.states
    states[parameters[0]]["residual"].fill_(3.0)
    states[parameters[0]]["delayed_update"].fill_(2.0)
    sync.load(parameters[0], states[parameters[0]], {})
    assert (states[parameters[0]]["residual"] == 3).all()
    assert (states[parameters[0]]["delayed_update"] == 2).all()


def _mesh() -> Any:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))


def _updated(sync: MomentumSync, trained: Trained, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """The updates of a step, whose ops run."""
    updates = sync.updates(trained, gradients)
    part = sync.step_part({"adamw[0]": trained.parameters})
    for op in [*part.ops.first, *(op for op, _ in part.ops.needed)]:
        if op.phase == IN_STEP and runs(op, part.facts(gradients)):
            part.actions[op.kind](op)
    return updates


def _late() -> None:
    rank = torch.distributed.get_rank()
    sync, trained = _sync(_mesh(), delay=1, replicator=Full(), decay=0.0, merge="mean")
    parameters, states = trained.parameters, trained.states
    sync.plan(trained, dict.fromkeys(parameters, "p"), 0)
    of_nodes = [[_drawn_gradients(parameters, 10 * step + node) for node in range(2)] for step in range(3)]
    means = [{p: (one[p] + two[p]) / 2 for p in parameters} for one, two in of_nodes]
    updates = _updated(sync, trained, of_nodes[0][rank])
    assert not any(parameter in updates for parameter in parameters)
    updates = _updated(sync, trained, of_nodes[1][rank])
    for parameter in parameters:
        torch.testing.assert_close(updates[parameter], means[0][parameter])
    sync.finish_in_flight(states)
    for parameter in parameters:
        assert states[parameter]["has_delayed_update"] == 1
        torch.testing.assert_close(states[parameter]["delayed_update"], means[1][parameter])
    # What was kept is applied once, by the next step.
    updates = _updated(sync, trained, of_nodes[2][rank])
    for parameter in parameters:
        torch.testing.assert_close(updates[parameter], means[1][parameter])
        assert states[parameter]["has_delayed_update"] == 0


def test_updates_are_a_step_late_even_if_the_state_was_read(gloo: ProcessPool) -> None:
    gloo.run(_late, world_size=2)


def _steps_from(num_steps: int) -> list[int]:
    sync, trained = _sync(_mesh(), overlap="step")
    parameters = trained.parameters
    assert sync.plan(trained, dict.fromkeys(parameters, "p"), num_steps) is None
    assert sync._exchanges is not None
    found = [sync._exchanges.step]
    sync.finish(trained, num_steps + 1)
    return [*found, sync._exchanges.step]


def test_exchanges_are_numbered_on_after_a_resume(gloo: ProcessPool) -> None:
    assert gloo.run(_steps_from, 7, world_size=2) == [[7, 8]] * 2
