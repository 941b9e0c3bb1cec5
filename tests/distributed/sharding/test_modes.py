"""What ZeRO-2 holds, and what a mode refuses."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode
from tests.distributed.sharding.training import Training, mesh_of
from tests.support.processes import ProcessPool


def _train_and_lose(mode: str, name: str, *, after_backward: bool = False) -> None:
    """Before or after the second backward pass the second rank loses state."""
    training = Training.start(mode, mesh_of((dist.get_world_size(),)))
    parameter: Any = training.net.tail.scale if name == "scale" else training.net.blocks[0].up.weight
    training.backward(0)
    training.optimizer.step()
    for is_after in (False, True):
        if dist.get_rank() == 1 and is_after == after_backward:
            training.optimizer.state.pop(parameter)
        if not is_after:
            training.backward(1)
    training.optimizer.step()


@pytest.mark.parametrize(
    ("mode", "name", "after_backward"),
    [("fsdp", "weight", False), ("fsdp", "scale", True), ("zero2", "weight", False), ("ddp", "weight", True)],
)
def test_state_that_one_rank_has_lost_is_an_error(
    gloo: ProcessPool, mode: str, name: str, after_backward: bool
) -> None:
    """Also that of 0-d parameters, of which each rank has a copy."""
    match = "state=zeros|local parameters without state"
    gloo.expect_error_on_all_ranks(
        _train_and_lose,
        mode,
        name,
        after_backward=after_backward,
        match=match,
        exception=RuntimeError,
        world_size=2,
        timeout=30,
    )


def _held(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[dict[str, int], list[bool], int, int]:
    """Elements of what is updated, state and gradients, all float32; which ``p.grad`` exist after backward.

    Then the elements of the largest tensor, and the number of gradients that are still in memory after the step.
    """
    training = Training.start("zero2", mesh_of(shape), dtype=dtype, bucket_bytes=600)
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
    kinds = {
        "weights": [layout.local(parameter) for parameter in parameters],
        "gradients": [gradient for gradient in gradients if gradient is not None],
        "state": states,
    }
    assert {each.dtype for tensors in kinds.values() for each in tensors} == {torch.float32}
    held = {kind: sum(each.numel() for each in tensors) for kind, tensors in kinds.items()}
    whole = [parameter.grad is not None for parameter in parameters]
    # A step that knows which gradients to expect, as all but the first do.
    training.optimizer.step()
    training.backward(1)
    alive = [weakref.ref(gradient) for p in parameters if (gradient := layout.gradient(p)) is not None]
    del gradients, gradient, kinds
    training.optimizer.step()
    training.optimizer.zero_grad()
    num_alive = sum(reference() is not None for reference in alive)
    return held, whole, max(p.numel() for p in parameters), num_alive


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_updated_is_sharded(gloo: ProcessPool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    size = torch.Size(shape).numel()
    (alone, *_), *_ = gloo.run(_held, (1,), dtype, world_size=1)
    results = gloo.run(_held, shape, dtype, world_size=size)
    for held, whole_gradients, largest, num_alive in results:
        assert not any(whole_gradients) and num_alive == 0
        for kind, count in held.items():
            # No rank has much more than its share: at most one matrix, or the rows that do not divide.
            assert count <= alone[kind] / shape[-1] + 2 * largest
    for kind, count in alone.items():
        # One 0-d parameter is on every rank, with two moments.
        extra = (size - size // shape[-1]) * (2 if kind == "state" else 1)
        assert sum(held[kind] for held, *_ in results) == count * size // shape[-1] + extra


def _too_early(sharding: Any) -> None:
    with make_mode(sharding, init_device_mesh("cpu", (dist.get_world_size(),)), ModeOptions()).no_sync():
        pass


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
def test_a_mode_that_is_not_attached_says_so(gloo: ProcessPool, sharding: str) -> None:
    match = r"call mode.prepare\(module\) and mode.attach\(module, optimizers\) first"
    gloo.expect_error_on_all_ranks(_too_early, sharding, world_size=1, exception=RuntimeError, match=match)


def _added_pass() -> None:
    """A backward pass between two calls of :meth:`finish_gradients`, of which the first one has divided."""
    net = nn.Linear(1, 1, bias=False)
    mode = make_mode("none", init_device_mesh("cpu", (dist.get_world_size(),)), ModeOptions())
    mode.prepare(net)
    mode.attach(net, [torch.optim.SGD(net.parameters())])
    mode.set_gradient_divisor(3.0)
    for _ in range(2):
        net(torch.ones(1, 1)).sum().backward()
        mode.finish_gradients()
        mode.finish_gradients()  # Again before clipping, for example: nothing is divided twice.
        assert net.weight.grad is not None and net.weight.grad.item() == 1 / torch.tensor(3.0)


@pytest.mark.parametrize(("world_size", "match"), [(1, "zero_grad"), (2, "there are 2 data-parallel ranks")])
def test_added_passes_and_several_ranks_are_errors(gloo: ProcessPool, world_size: int, match: str) -> None:
    gloo.expect_error_on_all_ranks(_added_pass, world_size=world_size, match=match)
