"""State that is lost on some ranks, what ZeRO-2 holds, and divisors that are refused."""

import weakref
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode
from tests.distributed.sharding.training import Training, largest_difference, mesh_of
from tests.support.processes import ProcessPool


def _lose(training: Training, ranks: Collection[int]) -> None:
    if dist.get_rank() in ranks:
        training.optimizer.state.pop(training.net.blocks[0].up.weight)  # type: ignore[union-attr,arg-type]
        training.optimizer.state.pop(training.net.tail.scale)  # type: ignore[arg-type]


def _train_and_lose(mode: str, ranks: Collection[int], *, after_backward: bool = False) -> dict[str, Tensor]:
    """Four steps; before or after the backward pass of the third, ``ranks`` lose state."""
    training = Training.start(mode, mesh_of((dist.get_world_size(),)))
    for step in range(4):
        if step == 2 and not after_backward:
            _lose(training, ranks)
        training.backward(step)
        if step == 2 and after_backward:
            _lose(training, ranks)
        training.optimizer.step()
    return training.weights()


@pytest.mark.parametrize(
    ("mode", "ranks", "after_backward"),
    [("fsdp", (1,), False), ("fsdp", (1,), True), ("zero2", (1,), False), ("ddp", (1,), True)],
)
def test_state_that_one_rank_has_lost_begins_with_zeros_on_all(
    gloo: ProcessPool, mode: str, ranks: tuple[int, ...], after_backward: bool
) -> None:
    """Also that of 0-d parameters, of which each rank has a copy."""
    expected = gloo.run(_train_and_lose, "ddp", range(2), world_size=2)[0]
    for found in gloo.run(_train_and_lose, mode, ranks, after_backward=after_backward, world_size=2, timeout=30):
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
        local_tensor(value)
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
