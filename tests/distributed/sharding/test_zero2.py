"""ZeRO-2: what each rank holds, when gradients are freed, and states that go from one layout to another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.distributed.sharding.training import Run, Training, loss, mesh_of
from tests.support.processes import ProcessPool


def _held(shape: tuple[int, ...]) -> tuple[dict[str, int], list[bool], int]:
    """Elements of state and of gradients, which ``p.grad`` exist after backward, elements of the largest tensor."""
    training = Training.start("zero2", mesh_of(shape), bucket_bytes=600)
    loss(training.net, Run(), 0, 0, dist.get_rank()).backward()
    training.mode.finish_gradients()
    layout = training.mode.layout
    parameters = [p for p in training.net.parameters() if p.requires_grad]
    gradients = [layout.gradient(parameter) for parameter in parameters]
    states = [
        value.to_local() if isinstance(value, DTensor) else value
        for parameter in parameters
        for key, value in training.optimizer.state[parameter].items()
        if key != "step"
    ]
    held = {
        "gradients": sum(gradient.numel() for gradient in gradients if gradient is not None),
        "state": sum(state.numel() for state in states),
    }
    return held, [parameter.grad is not None for parameter in parameters], max(p.numel() for p in parameters)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
def test_gradients_and_state_are_sharded(gloo: ProcessPool, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel()
    (alone, _, _), *_ = gloo.run(_held, (1,), world_size=1)
    results = gloo.run(_held, shape, world_size=size)
    for held, whole_gradients, largest in results:
        assert not any(whole_gradients)
        for kind, count in held.items():
            # No rank has much more than its share: at most one matrix, or the rows that do not divide.
            assert count <= alone[kind] / shape[-1] + 2 * largest
    for kind, count in alone.items():
        # One 0-d parameter is on every rank, with two moments.
        extra = (size - size // shape[-1]) * (1 if kind == "gradients" else 2)
        assert sum(held[kind] for held, _, _ in results) == count * size // shape[-1] + extra


def _states(training: Training) -> list[Tensor]:
    saved = training.optimizer.state_dict()["state"].values()
    return [getattr(v, "_local_tensor", v).clone() for state in saved for key, v in state.items() if key != "step"]


def _with_a_hole() -> dict[str, Tensor]:
    training = Training.start("zero2", mesh_of((2,)))
    training.step(Run(), 0)
    training.optimizer.zero_grad()
    loss(training.net, Run(), 1, 0, dist.get_rank()).backward()
    training.mode.finish_gradients()
    gradient = training.mode.layout.gradient(training.net.blocks[0].up.weight)
    assert gradient is not None
    if gradient.numel():
        gradient[0, 0] = torch.nan
    before, states = training.weights(), _states(training)
    training.optimizer.step()
    training.mode.end_step()
    assert training.optimizer.skipped_steps == 1
    assert all(map(torch.equal, states, _states(training)))
    weights = training.weights()
    assert all(torch.equal(before[name], weights[name]) for name in before)
    training.step(Run(), 2)
    return training.weights()


def test_a_nan_on_the_owner_skips_the_step_everywhere(gloo: ProcessPool) -> None:
    first, second = gloo.run(_with_a_hole, world_size=2)
    assert all(torch.equal(first[name], second[name]) and first[name].isfinite().all() for name in first)
