"""State of nodes that exchange momenta, and updates that are promised before they are decoded."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon import FlexDeMoConfig, Full
from lightning_muon.flexdemo.inter_node_sync import Trained
from lightning_muon.flexdemo.momentum_sync import MomentumSync, Updates, like
from lightning_muon.schedule.program import IN_STEP, runs
from tests.support.processes import ProcessPool

SHAPES = [(13, 7), (5,), (9, 9)]


def _sync(mesh: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[MomentumSync, Trained]:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    states: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    config = FlexDeMoConfig(**({"sign": False, "dense_below": 10, "value_format": "fp32"} | options))
    sync = MomentumSync(config, mesh)
    for parameter in parameters:
        sync.init_state(parameter, states[parameter])
    return sync, Trained(parameters, states)


def _drawn_gradients(trained: Trained, seed: int) -> dict[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p: torch.randn(p.shape, generator=generator).to(p.dtype) for p in trained.parameters}


def test_updates_are_promised_before_they_are_decoded() -> None:
    one, other, own = torch.zeros(3), torch.zeros(2), torch.zeros(1)
    updates = Updates({one, other}, {own: torch.ones(1), one: torch.full((3,), 2.0)})
    assert all(tensor in updates for tensor in (one, other, own))
    assert updates.keys() == {own} and updates.late.keys() == {one}
    with pytest.raises(KeyError):
        updates[other]


def test_an_update_has_the_dtype_and_strides_of_its_parameter() -> None:
    parameter = torch.zeros(4, 3, 2, 2, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    update = torch.randn(4, 3, 2, 2)
    found = like(parameter, update)
    assert found.dtype == torch.bfloat16 and found.stride() == parameter.stride()
    assert torch.equal(found, update.bfloat16()) and like(update, update) is update


@pytest.mark.parametrize("delay", [0, 1])
def test_state_is_float32_whatever_the_parameters_are(delay: int) -> None:
    sync, trained = _sync(dtype=torch.bfloat16, delay=delay)
    for parameter in trained.parameters:
        state = trained.states[parameter]
        assert set(state) == {"residual"} | ({"delayed_update", "has_delayed_update"} if delay else set())
        assert (state["residual"].dtype, state["residual"].shape) == (torch.float32, (1, *parameter.shape))
        if delay:
            assert (state["delayed_update"].dtype, state["delayed_update"].shape) == (torch.float32, parameter.shape)
            assert state["has_delayed_update"] == 0
        residual = state["residual"]
        sync.init_state(parameter, state)
        assert state["residual"] is residual, "state was made anew"


def test_one_node_applies_the_residuals_that_it_takes_over_once() -> None:
    sync, trained = _sync(decay=0.5, delay=1)
    saved = {p: torch.randn(3, *p.shape) for p in trained.parameters}
    for parameter in trained.parameters:
        state = trained.states[parameter]
        state["delayed_update"].fill_(2.0)
        sync.load(parameter, state, {"residual": saved[parameter]})
        torch.testing.assert_close(state["residual"][0], saved[parameter].sum(0))
        assert (state["delayed_update"] == 2).all(), "what was not saved stays"
    for step in range(2):
        gradients = _drawn_gradients(trained, step)
        updates = sync.updates(trained, gradients)
        for parameter in trained.parameters:
            left = 0.5 * saved[parameter].sum(0) if step == 0 else 0.0
            torch.testing.assert_close(updates[parameter], gradients[parameter] + left)
    assert sync.sent_bytes(trained.parameters) == 0


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
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    sync, trained = _sync(mesh, delay=1, replicator=Full(), decay=0.0, merge="mean")
    parameters, states = trained.parameters, trained.states
    sync.plan(trained, dict.fromkeys(parameters, "p"))
    of_nodes = [[_drawn_gradients(trained, 10 * step + node) for node in range(2)] for step in range(3)]
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
