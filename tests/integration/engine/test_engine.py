"""Between backward and step: closures, NaN, forward passes, gradients thrown away."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.integration.integrations.accelerate.loop import accelerator_on_cpu
from tests.integration.integrations.fabric import loop
from tests.integration.training import (
    full_weights,
    loss_of,
    max_difference,
)
from tests.support.processes import ProcessPool


def _with_closure() -> dict[str, Tensor]:
    fabric, model, optimizer = loop.set_up()
    losses = []
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = torch.zeros(())
            for index in range(2):
                tokens, targets = loop.own_rows(fabric, loop.micro_batch(step, index))
                with fabric.no_backward_sync(model, enabled=index == 0):
                    loss = loss_of(model(tokens), targets) / 2
                    fabric.backward(loss)
            return loss

        losses.append(optimizer.step(closure))
    assert all(isinstance(loss, Tensor) and loss.isfinite() for loss in losses)
    return loop.end(fabric, model)


def test_a_closure_computes_the_gradients_of_its_step(gloo: ProcessPool) -> None:
    assert max_difference(gloo.run(_with_closure, world_size=2)[0], loop.reference()) <= 1e-6


def _clip_a_nan() -> None:
    fabric, model, optimizer = loop.set_up()
    tokens, targets = loop.own_rows(fabric, loop.micro_batch(0, 0))
    fabric.backward(loss_of(model(tokens), targets) * (float("nan") if dist.get_rank() else 1.0))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)


def test_a_nan_raises_on_all_ranks_where_clipping_is_asked_to(gloo: ProcessPool) -> None:
    match = "the norm of the gradients is nan"
    gloo.expect_error_on_all_ranks(_clip_a_nan, exception=RuntimeError, match=match, world_size=2)


def _never_reduced(what: str) -> None:
    fabric, model, optimizer = loop.set_up()
    tokens, targets = loop.own_rows(fabric, loop.micro_batch(0, 0))
    if what == "backward":
        loss_of(model(tokens), targets).backward()
    with fabric.no_backward_sync(model):
        fabric.backward(loss_of(model(tokens), targets))
    if what == "clip":
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()


@pytest.mark.parametrize(
    ("what", "match"), [("clip", "clip_gradients .* after micro-batches"), ("backward", "call `fabric.backward")]
)
def test_gradients_that_were_not_reduced_are_an_error(gloo: ProcessPool, what: str, match: str) -> None:
    gloo.expect_error_on_all_ranks(_never_reduced, what, exception=RuntimeError, match=match, world_size=2)


def _forward_before_step(kind: str) -> dict[str, Tensor]:
    """A forward pass between backward and step, such as one that logs a loss."""
    with contextlib.ExitStack() as stack:
        if kind == "accelerate":
            runner: Any = stack.enter_context(accelerator_on_cpu(accumulate=1))
            module: Any = loop.network()
            model, optimizer = runner.prepare(module, loop.adamw(module))
        else:
            runner, model, optimizer = loop.set_up()
            module = model.module
            stack.callback(runner.strategy.teardown)
        for step in range(4):
            tokens, targets = (whole[dist.get_rank() :: 2] for whole in loop.micro_batch(step, 0))
            runner.backward(loss_of(model(tokens), targets))
            assert loss_of(model(tokens), targets).isfinite()
            optimizer.step()
            optimizer.zero_grad()
        return full_weights(module)


@pytest.mark.parametrize("kind", ["fabric", "accelerate"])
def test_a_forward_before_the_step_leaves_no_old_weights(gloo: ProcessPool, kind: str) -> None:
    expected = loop.reference(accumulate=1)
    assert max_difference(gloo.run(_forward_before_step, kind, world_size=2)[0], expected) <= 1e-6


def _thrown_away(**options: Any) -> dict[str, Tensor]:
    """A micro-batch without reduction that ``zero_grad`` throws away, before each step."""
    fabric, model, optimizer = loop.set_up(**options)
    for step in range(4):
        for index in range(2):
            tokens, targets = loop.own_rows(fabric, loop.micro_batch(step, 1 - index))
            with fabric.no_backward_sync(model, enabled=index == 0):
                fabric.backward(loss_of(model(tokens), targets) * (1.0 if index else 1000.0))
            if index == 0:
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return loop.end(fabric, model)


@pytest.mark.parametrize(
    "options",
    [{}, {"reshard_after_backward": False, "accumulate": "whole"}, {"replicate_size": 2}, {"sharding": "zero2"}],
    ids=str,
)
def test_zero_grad_throws_away_what_was_not_reduced(gloo: ProcessPool, options: dict[str, Any]) -> None:
    found = gloo.run(_thrown_away, world_size=2, **options)[0]
    assert max_difference(found, loop.reference(accumulate=1)) <= 1e-6
