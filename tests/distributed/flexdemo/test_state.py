"""State of FlexDeMo: resumed runs, late updates, other numbers of nodes, skipped steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon import DCTTopK, DiLoCo, FlexDeMo, Random
from tests.distributed.flexdemo.models import Plan, ShardedNet
from tests.distributed.flexdemo.setup import SMALL, Case, Ranks, assert_close, assert_equal, local, train, train_all
from tests.support.processes import ProcessPool

OPTIONS: dict[str, Any] = SMALL | {"replicator": DCTTopK(chunk_size=8, top_k=5), "chunk_bytes": 2000}


class _Read(Ranks):
    """Before each step the state is read, for which updates on their way are waited for."""

    def set_gradients(self, step: int) -> None:
        self.optimizer.state_dict()
        super().set_gradients(step)


@pytest.mark.parametrize(
    ("mesh_shape", "options", "kind"),
    [((2, 2), {"sign": False}, Ranks), ((3, 1), {"replicator": Random(rate=0.25)}, Ranks), ((2, 1), {}, _Read)],
    ids=str,
)
def test_late_updates_are_the_same_updates(
    gloo: ProcessPool, mesh_shape: tuple[int, int], options: dict[str, Any], kind: type[Ranks]
) -> None:
    case = Case(mesh_shape=mesh_shape, options=OPTIONS | options)
    late = replace(case, options=case.options | {"delay": 1}, num_steps=case.num_steps + 1)
    cases = [case, late, replace(late, num_steps=case.num_steps), replace(late, num_steps=1)]
    for on_time, one_step_more, as_many_steps, first_step in gloo.run(
        train_all, cases, kind, world_size=case.world_size
    ):
        assert_equal(one_step_more[0], on_time[0])
        assert_equal(as_many_steps[1], on_time[1])
        assert_equal(first_step[0], case.weights())


def test_late_updates_do_not_hold_up_the_next_process_group(gloo: ProcessPool) -> None:
    case = Case(mesh_shape=(3, 1), options=OPTIONS | {"delay": 1, "replicator": Random(rate=0.25)})
    gloo.run(train, case, world_size=3)
    # Rank 2 is left out, and keeps the groups of before.
    gloo.run(train, replace(case, mesh_shape=(2, 1)), world_size=2, timeout=30.0)


def _skip_after_backward(plan: Plan) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """The same with buffers that are on their way when a gradient turns out to be broken."""
    ranks = ShardedNet(plan)
    ranks.train([0])
    results = [(ranks.weights(), ranks.residuals())]
    ranks.backward(5)
    if torch.distributed.get_rank() == 1:
        grad = ranks.model.second.weight.grad
        assert grad is not None
        local(grad).view(-1)[2] = float("nan")
    ranks.optimizer.step()
    results.append((ranks.weights(), ranks.residuals()))
    ranks.train([1, 2])
    undisturbed = ShardedNet(plan)
    undisturbed.train(range(3))
    return [*results, (ranks.weights(), ranks.residuals()), (undisturbed.weights(), undisturbed.residuals())]


@pytest.mark.parametrize(
    ("mesh_shape", "replicator"), [((2, 2), DCTTopK(chunk_size=8, top_k=5)), ((3, 1), Random(rate=0.25))], ids=str
)
def test_early_sends_of_a_skipped_step_leave_no_trace(
    gloo: ProcessPool, mesh_shape: tuple[int, int], replicator: Any
) -> None:
    plan = Plan(mesh_shape=mesh_shape, options=OPTIONS | {"replicator": replicator})
    for before, after, end, undisturbed in gloo.run(_skip_after_backward, plan, world_size=plan.world_size):
        for index in range(2):
            assert_equal(after[index], before[index])
            assert_equal(end[index], undisturbed[index])


def _lost_state(options: dict[str, Any], *, is_new: bool, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Tensor]:
    """Two steps, then the state is lost (or the optimizer is made anew), then three more."""
    ranks_ = Ranks(Case(mesh_shape=(2, 1), options=options))
    ranks_.train(range(2))
    if is_new:
        ranks_.optimizer.state_dict()  # What is on its way arrives.
        ranks_.optimizer = FlexDeMo(ranks_.parameters.items(), **({"lr": 0.01, "mesh": ranks_.mesh} | options))
    elif dist.get_rank() in ranks:
        ranks_.optimizer.state.clear()
    ranks_.train(range(2, 5))
    return ranks_.weights()


@pytest.mark.parametrize(
    ("options", "overlap"),
    [
        ({}, "backward"),
        ({"base": "adamw"}, "step"),
        ({"delay": 1, "base": "muon", "compute_dtype": "float32"}, "backward"),
    ],
    ids=str,
)
def test_state_that_is_lost_is_that_of_a_new_optimizer(
    gloo: ProcessPool, options: dict[str, Any], overlap: str
) -> None:
    options = options | SMALL | {"overlap": overlap}
    new = gloo.run(_lost_state, options, is_new=True, world_size=2)
    for ranks in ((0, 1), (1,)):
        for found, expected in zip(
            gloo.run(_lost_state, options, is_new=False, ranks=ranks, world_size=2), new, strict=True
        ):
            for name, weight in expected.items():
                assert torch.equal(found[name], weight), name


def _losing_between_averages(steps_with_a_loss: tuple[int, ...]) -> dict[str, Tensor]:
    average = DiLoCo(period=2, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
    ranks = Ranks(Case(mesh_shape=(2, 1), options={"replicator": average, "sign": False, "lr": 0.05}))
    for step in range(6):
        if step in steps_with_a_loss:
            ranks.optimizer.state.clear()
        ranks.train([step], agree=False)
    ranks.check_nodes_agree()
    return ranks.weights()


@pytest.mark.parametrize("steps", [(3,), (1, 4)], ids=str)
def test_lost_state_keeps_progress_since_the_last_average(gloo: ProcessPool, steps: tuple[int, ...]) -> None:
    """An average with an outer learning rate of 1 is the mean of the weights, from whatever it counts."""
    expected = gloo.run(_losing_between_averages, (), world_size=2)[0]
    for found in gloo.run(_losing_between_averages, steps, world_size=2):
        assert_close(found, expected, 1e-6)
