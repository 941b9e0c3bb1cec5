"""All that ranks must know of each other before a step travels in two messages that the host waits for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_muon.sharding.base import ShardingMode
from tests.distributed.test_step_program import Net, start
from tests.support.processes import ProcessPool
from tests.support.tensors import weights_of

_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "barrier", "monitored_barrier")


class _Work:
    """A handle that notes whether the function that has begun the communication waits for it at once."""

    def __init__(self, work: Any, count: _Count) -> None:
        self._work, self._count = work, count
        frame = sys._getframe(3)
        while frame.f_code.co_name.startswith("start_"):  # The helpers of comm/ begin it for their callers.
            frame = frame.f_back
        self._begun_by = frame

    def wait(self, *args: Any) -> Any:
        frame = sys._getframe(1)
        while frame is not None and frame is not self._begun_by:
            frame = frame.f_back
        self._count.num_blocking += frame is not None
        self._count.num_deferred += frame is None
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Count:
    """Collectives of whole numbers and of objects in host memory, for which the host has waited."""

    def __init__(self) -> None:
        self.num_blocking = self.num_deferred = 0

    def all_reduce(self, original: Any, tensor: Tensor, *args: Any, async_op: bool = False, **more: Any) -> Any:
        work = original(tensor, *args, async_op=async_op, **more)
        is_asked = not tensor.is_floating_point()  # Sums of gradients and norms stay on the device.
        self.num_blocking += is_asked and not async_op
        return _Work(work, self) if is_asked and async_op else work

    def of_objects(self, original: Any, *args: Any, **more: Any) -> Any:
        self.num_blocking += 1
        return original(*args, **more)


@contextmanager
def _counting() -> Iterator[_Count]:
    count = _Count()
    patches = [("all_reduce", count.all_reduce), *((name, count.of_objects) for name in _OBJECTS)]
    originals = {name: getattr(dist, name) for name, _ in patches}
    with mock.patch.multiple(
        dist, **{name: (lambda *a, _f=f, _o=originals[name], **k: _f(_o, *a, **k)) for name, f in patches}
    ):
        yield count


def _backward(mode: ShardingMode, net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    F.mse_loss(net(inputs), inputs.roll(1, 1)).backward()
    mode.finish_gradients()


def _count_of_fourth_step(name: str, shape: tuple[int, ...]) -> int:
    mode, net, optimizer = start(name, shape, {})
    for step in range(4):
        with _counting() as count:
            _backward(mode, net, optimizer, step)
            mode.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            mode.end_step()
    mode.finish_parameters()
    assert all(p.grad is None for p in net.unused.parameters())
    assert not any(optimizer.state[p].get("step", 0) for p in net.unused.parameters())
    assert count.num_deferred == 0
    return count.num_blocking


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fsdp", (4,)),
        ("fsdp", (2, 2)),
        ("zero2", (4,)),
        ("zero2", (2, 2)),
        ("ddp", (4,)),
        ("flexdemo", (2, 2)),
        ("flexdemo", (4, 1)),
    ],
)
def test_the_host_waits_for_two_messages_of_a_step(gloo: ProcessPool, name: str, shape: tuple[int, ...]) -> None:
    """One ends the reduction of gradients, with FSDP2 where a node has several ranks; the other begins the step."""
    assert set(gloo.run(_count_of_fourth_step, name, shape, world_size=4)) == {1 if shape == (4, 1) else 2}


def test_one_process_waits_for_nobody(gloo: ProcessPool) -> None:
    assert gloo.run(_count_of_fourth_step, "none", (1,), world_size=1) == [0]


def _change(kind: str, net: Net, optimizer: torch.optim.Optimizer) -> None:
    """What a callback on one rank may do between the end of backward and the step."""
    weight = net.layers[0][0].weight
    if kind == "gradient is gone":
        weight.grad = None
    elif kind == "gradient is new":
        net.unused.weight.grad = torch.ones_like(net.unused.weight)
    elif kind == "NaN":
        assert weight.grad is not None
        weight.grad.mul_(float("nan"))
    elif kind == "frozen":
        weight.requires_grad_(False)
    elif kind == "state is gone":
        del optimizer.state[weight]
    elif kind == "momentum is wrong":
        optimizer.param_groups[0]["momentum"] = "much"
    elif kind == "gradients are gone":
        optimizer.zero_grad()


def _changed_on_one_rank(name: str, kind: str) -> tuple[list[Tensor], int, str]:
    mode, net, optimizer = start(name, (2,), {})
    error = ""
    for step in range(3):
        _backward(mode, net, optimizer, step)
        if step == 2 and dist.get_rank() == 1:
            _change(kind, net, optimizer)
        try:
            optimizer.step()
        except (RuntimeError, ValueError) as problem:
            error = str(problem)
            break
    mode.finish_parameters()
    return list(weights_of(net).values()), optimizer.skipped_steps, error


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ddp", "gradient is gone"),
        ("ddp", "gradient is new"),
        ("ddp", "NaN"),
        ("ddp", "frozen"),
        ("ddp", "state is gone"),
        ("ddp", "momentum is wrong"),
        ("zero2", "state is gone"),
        ("zero2", "momentum is wrong"),
        ("zero2", "gradients are gone"),
        ("zero2", "frozen"),
        ("fsdp", "gradient is gone"),
        ("fsdp", "NaN"),
    ],
)
def test_what_one_rank_changes_before_the_step_reaches_all(gloo: ProcessPool, name: str, kind: str) -> None:
    (first, skipped, error), (second, other_skipped, other_error) = gloo.run(
        _changed_on_one_rank, name, kind, world_size=2
    )
    assert skipped == other_skipped == (kind == "NaN")
    assert bool(error) == bool(other_error)
    assert all(map(torch.equal, first, second))
