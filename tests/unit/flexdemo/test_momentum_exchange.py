"""Exchange of momenta: state, plans, saved residuals and late updates, without an optimizer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon import DCTTopK, FlexDeMoConfig, Full
from lightning_muon.flexdemo.inter_node_sync import OptimizerView
from lightning_muon.flexdemo.momentum_sync import EarlyExchanges, MomentumExchange
from tests.support.processes import ProcessPool

SHAPES = [(13, 7), (5,), (9, 9)]
LR = 0.25


def _exchange(
    mesh: Any = None, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[MomentumExchange, list[nn.Parameter], dict[Tensor, dict[str, Any]]]:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    states: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    config = FlexDeMoConfig(**({"sign": False, "dense_below": 10, "value_format": "fp32"} | options))
    rates = dict.fromkeys(parameters, LR)
    exchange = MomentumExchange(OptimizerView(config, mesh, lambda: states, lambda: parameters, lambda: rates))
    for parameter in parameters:
        exchange.init_state(parameter)
    return exchange, parameters, states


def _gradients(parameters: list[nn.Parameter], seed: int) -> dict[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p: torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters}


@pytest.mark.parametrize("delay", [0, 1])
def test_state_is_float32_whatever_the_parameters_are(delay: int) -> None:
    exchange, parameters, states = _exchange(dtype=torch.bfloat16, delay=delay)
    for parameter in parameters:
        state = states[parameter]
        assert set(state) == {"residual"} | ({"delayed_update", "has_delayed_update"} if delay else set())
        assert state["residual"].dtype == torch.float32
        assert state["residual"].shape == (1, *parameter.shape)
        if delay:
            assert (state["delayed_update"].dtype, state["delayed_update"].shape) == (torch.float32, parameter.shape)
            assert state["has_delayed_update"] == 0
        residual = state["residual"]
        exchange.init_state(parameter)
        assert states[parameter]["residual"] is residual, "state was made anew"


def test_one_node_applies_its_gradients_and_sends_nothing() -> None:
    for sign in (False, True):
        exchange, parameters, _ = _exchange(sign=sign)
        gradients = _gradients(parameters[:2], 1)
        assert exchange.plan({}, 0) is None
        updates = exchange.updates(gradients, frozenset())
        assert set(updates) == set(parameters[:2])
        for parameter in parameters[:2]:
            expected = gradients[parameter].sign() if sign else gradients[parameter]
            assert torch.equal(updates[parameter], expected)
        assert exchange.sent_bytes() == 0
        assert exchange.order == []


def test_one_node_applies_the_residuals_that_it_takes_over_once() -> None:
    exchange, parameters, states = _exchange(decay=0.5)
    saved = {p: torch.randn(3, *p.shape) for p in parameters}
    for parameter in parameters:
        exchange.load(parameter, {"residual": saved[parameter]})
        torch.testing.assert_close(states[parameter]["residual"][0], saved[parameter].sum(0))
    for step in range(2):
        gradients = _gradients(parameters, step)
        updates = exchange.updates(gradients, frozenset())
        for parameter in parameters:
            left = 0.5 * saved[parameter].sum(0) if step == 0 else 0.0
            torch.testing.assert_close(updates[parameter], gradients[parameter] + left)


def test_what_was_not_saved_stays() -> None:
    exchange, parameters, states = _exchange(delay=1)
    states[parameters[0]]["residual"].fill_(3.0)
    states[parameters[0]]["delayed_update"].fill_(2.0)
    exchange.load(parameters[0], {})
    assert (states[parameters[0]]["residual"] == 3).all()
    assert (states[parameters[0]]["delayed_update"] == 2).all()


def _mesh() -> Any:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))


def _late() -> None:
    rank = torch.distributed.get_rank()
    exchange, parameters, states = _exchange(_mesh(), delay=1, replicator=Full(), decay=0.0, merge="mean")
    exchange.plan(dict.fromkeys(parameters, "p"), 0)
    of_nodes = [[_gradients(parameters, 10 * step + node) for node in range(2)] for step in range(3)]
    means = [{p: (one[p] + two[p]) / 2 for p in parameters} for one, two in of_nodes]
    updates = exchange.updates(of_nodes[0][rank], frozenset())
    assert not any(parameter in updates for parameter in parameters)
    updates = exchange.updates(of_nodes[1][rank], frozenset())
    for parameter in parameters:
        torch.testing.assert_close(updates[parameter], means[0][parameter])
    exchange.finish_in_flight()
    for parameter in parameters:
        assert states[parameter]["has_delayed_update"] == 1
        torch.testing.assert_close(states[parameter]["delayed_update"], means[1][parameter])
    # What was kept is applied once, by the next step.
    updates = exchange.updates(of_nodes[2][rank], frozenset())
    for parameter in parameters:
        torch.testing.assert_close(updates[parameter], means[1][parameter])
        assert states[parameter]["has_delayed_update"] == 0


def test_updates_are_a_step_late_also_when_the_state_was_looked_at(gloo: ProcessPool) -> None:
    gloo.run(_late, world_size=2)


def _compat(compat: str) -> list[tuple[int, ...]]:
    rank = torch.distributed.get_rank()
    options = {"replicator": DCTTopK(chunk_size=8, top_k=64), "compat": compat, "decay": 0.0, "merge": "mean"}
    exchange, parameters, _ = _exchange(_mesh(), **options)
    early = exchange.plan(dict.fromkeys(parameters, "p"), 0)
    assert isinstance(early, EarlyExchanges)
    assert [sorted(map(id, group)) for group in exchange.order] == [sorted(map(id, parameters))]
    of_nodes = [_gradients(parameters, node) for node in range(2)]
    updates = exchange.updates(of_nodes[rank], frozenset())
    for parameter in parameters:
        mean = (of_nodes[0][parameter] + of_nodes[1][parameter]) / 2
        torch.testing.assert_close(updates[parameter], mean * (1.0 if compat == "none" else LR), rtol=0, atol=1e-5)
    assert exchange._replication is not None
    return [part.block_shape for bucket in exchange._replication.buckets.values() for part in bucket.plan.parts]


@pytest.mark.parametrize("compat", ["none", "demo", "detonation"])
def test_conventions_of_others_scale_gradients_and_cut_strips(gloo: ProcessPool, compat: str) -> None:
    for block_shapes in gloo.run(_compat, compat, world_size=2):
        assert set(block_shapes) == ({(8,), ()} if compat == "detonation" else {(8, 8), (8, 7), ()})


def _steps_from(num_steps: int) -> list[int]:
    exchange, parameters, _ = _exchange(_mesh(), overlap="step")
    assert exchange.plan(dict.fromkeys(parameters, "p"), num_steps) is None
    assert exchange._replication is not None
    found = [exchange._replication.step]
    exchange.finish(num_steps + 1)
    return [*found, exchange._replication.step]


def test_turns_go_on_where_they_were(gloo: ProcessPool) -> None:
    assert gloo.run(_steps_from, 7, world_size=2) == [[7, 8]] * 2
