"""State that is lost on some ranks, what ZeRO-2 holds, and steps that are skipped or refused."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_muon import ParallelMuon
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode
from tests.distributed.sharding.training import Training, largest_difference, loss, mesh_of, model, optimizer_for
from tests.matrix.row import Net
from tests.support.processes import ProcessPool


def _train_and_lose(mode: str, how: str, ranks: tuple[int, ...], *, after_backward: bool) -> dict[str, Tensor]:
    """Four steps; before or after the backward pass of the third, ``ranks`` lose state."""
    training = Training.start(mode, mesh_of((2,)))
    for step in range(4):
        is_lost = step == 2 and dist.get_rank() in ranks
        if is_lost and not after_backward:
            _lose(training.net, training.optimizer, how)
        training.backward(step)
        if is_lost and after_backward:
            _lose(training.net, training.optimizer, how)
        training.optimizer.step()
    return training.weights()


def _lose_alone(how: str) -> dict[str, Tensor]:
    net = model()
    optimizer = optimizer_for(net)
    for step in range(4):
        if step == 2:
            _lose(net, optimizer, how)
        optimizer.zero_grad()
        for rank in range(2):
            (loss(net, step, rank) / 2).backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def _lose(net: Net, optimizer: ParallelMuon, how: str) -> None:
    if how == "all":
        optimizer.state.clear()
    elif how == "keys":  # Other keys in their places: as many as before.
        optimizer.state[net.blocks[0].up.weight] = {"other": 0}
        optimizer.state[net.blocks[1].norm.weight].pop("exp_avg")
        optimizer.state[net.blocks[1].norm.weight]["other"] = 0
    else:
        optimizer.state.pop(net.blocks[0].up.weight)
        optimizer.state.pop(net.tail.scale)


# Ranks that lose it, and whether after the backward pass.
LOSSES = [((0, 1), False), ((1,), False), ((1,), True)]


@pytest.mark.parametrize(
    ("mode", "how", "losses"),
    [
        ("fsdp", "some", LOSSES),
        ("fsdp", "all", LOSSES[::2]),
        ("fsdp", "keys", LOSSES[1:2]),
        ("zero2", "some", LOSSES[:2]),
        ("ddp", "some", LOSSES[2:]),
    ],
)
def test_state_that_is_lost_on_any_rank_begins_with_zeros_on_all(
    gloo: ProcessPool, mode: str, how: str, losses: list[tuple[tuple[int, ...], bool]]
) -> None:
    """Also that of 0-d parameters, of which each rank has a copy."""
    expected = _lose_alone(how)
    for ranks, after_backward in losses:
        for found in gloo.run(
            _train_and_lose, mode, how, ranks, after_backward=after_backward, world_size=2, timeout=30
        ):
            assert largest_difference(found, expected)[0] < 1e-6


def _held(shape: tuple[int, ...]) -> tuple[dict[str, int], list[bool], int, int]:
    """Elements of state and of gradients, which ``p.grad`` exist after backward, elements of the largest tensor.

    Last the number of gradients that are still in memory after the step.
    """
    training = Training.start("zero2", mesh_of(shape), bucket_bytes=600)
    training.backward(0)
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
    whole = [parameter.grad is not None for parameter in parameters]
    # A step that knows which gradients to expect, as all but the first do.
    training.optimizer.step()
    training.backward(1)
    alive = [weakref.ref(gradient) for p in parameters if (gradient := layout.gradient(p)) is not None]
    del gradients, gradient
    training.optimizer.step()
    training.optimizer.zero_grad()
    num_alive = sum(reference() is not None for reference in alive)
    return held, whole, max(p.numel() for p in parameters), num_alive


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
def test_gradients_and_state_are_sharded(gloo: ProcessPool, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel()
    (alone, *_), *_ = gloo.run(_held, (1,), world_size=1)
    results = gloo.run(_held, shape, world_size=size)
    for held, whole_gradients, largest, num_alive in results:
        assert not any(whole_gradients) and num_alive == 0
        for kind, count in held.items():
            # No rank has much more than its share: at most one matrix, or the rows that do not divide.
            assert count <= alone[kind] / shape[-1] + 2 * largest
    for kind, count in alone.items():
        # One 0-d parameter is on every rank, with two moments.
        extra = (size - size // shape[-1]) * (1 if kind == "gradients" else 2)
        assert sum(held[kind] for held, *_ in results) == count * size // shape[-1] + extra


def _states(training: Training) -> list[Tensor]:
    saved = training.optimizer.state_dict()["state"].values()
    return [getattr(v, "_local_tensor", v).clone() for state in saved for key, v in state.items() if key != "step"]


def _with_a_hole() -> dict[str, Tensor]:
    training = Training.start("zero2", mesh_of((2,)))
    training.step(0)
    training.backward(1)
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
    training.step(2)
    return training.weights()


def test_a_nan_on_the_owner_skips_the_step_everywhere(gloo: ProcessPool) -> None:
    first, second = gloo.run(_with_a_hole, world_size=2)
    assert all(torch.equal(first[name], second[name]) and first[name].isfinite().all() for name in first)


def _too_early(sharding: Any) -> None:
    with make_mode(sharding, init_device_mesh("cpu", (dist.get_world_size(),)), ModeOptions()).no_sync():
        pass


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
def test_a_mode_that_is_not_attached_says_so(gloo: ProcessPool, sharding: str) -> None:
    match = r"call mode.prepare\(module\) and mode.attach\(module, optimizers\) first"
    gloo.expect_error_on_all_ranks(_too_early, sharding, world_size=1, exception=RuntimeError, match=match)


def _gradient(divisor: float | None, *, is_finished_between: bool = False) -> float:
    net = nn.Linear(1, 1, bias=False)
    mode = make_mode("none", init_device_mesh("cpu", (dist.get_world_size(),)), ModeOptions())
    mode.prepare(net)
    mode.attach(net, [torch.optim.SGD(net.parameters())])
    mode.set_gradient_divisor(divisor)
    with mode.no_sync():
        net(torch.ones(1, 1)).sum().backward()
    if is_finished_between:
        mode.finish_gradients()
    net(torch.ones(1, 1)).sum().backward()
    mode.finish_gradients()
    mode.finish_gradients()  # Again before clipping, for example: nothing is divided twice.
    assert net.weight.grad is not None
    return net.weight.grad.item()


@pytest.mark.parametrize(("world_size", "match"), [(1, "zero_grad"), (2, "there are 2 data-parallel ranks")])
def test_added_passes_and_several_ranks_are_errors(gloo: ProcessPool, world_size: int, match: str) -> None:
    gloo.expect_error_on_all_ranks(_gradient, 3.0, is_finished_between=True, world_size=world_size, match=match)
