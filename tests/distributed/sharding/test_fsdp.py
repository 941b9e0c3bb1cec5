"""FSDP2 as a mode: micro-batches, divisors, hooks that go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_muon.sharding.mode import ModeOptions
from lightning_muon.sharding.modes import make_mode
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 13)) for _ in range(3)))
    net.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    return net


def _batch(index: int) -> Tensor:
    return torch.randn(3, 13, generator=torch.Generator().manual_seed(index))


def _gradients(shape: tuple[int, ...], options: dict[str, Any], divisor: float | None) -> dict[str, Tensor]:
    net = _model()
    mode = make_mode("fsdp", mesh_of(shape), ModeOptions(wrap_policy=(nn.Sequential,), **options))
    mode.prepare(net)
    mode.attach(net, [torch.optim.SGD(net.parameters(), lr=0.1)])
    for step in range(2):  # The second step shows what the first one left behind.
        net.zero_grad()
        for micro_batch in range(2):
            with mode.no_sync():
                (net(_batch(10 * micro_batch + dist.get_rank())) * net.scale).square().sum().backward()
        mode.set_gradient_divisor(divisor if step else 99.0)
        (net(_batch(20 + dist.get_rank())) * net.scale).square().sum().backward()
        mode.finish_gradients()
        mode.end_step()
    mode.close()
    found = {name: parameter.grad for name, parameter in net.named_parameters()}
    return {
        name: g.full_tensor() if isinstance(g, DTensor) else g.clone() for name, g in found.items() if g is not None
    }


@pytest.mark.parametrize(
    ("options", "shape", "divisor"),
    [
        ({}, (3,), None),
        ({}, (2, 2), 5.0),
        ({}, (4, 1), None),
        ({"reshard_after_backward": False}, (2, 2), 5.0),
        ({"reshard_after_forward": False}, (2,), 5.0),
    ],
    ids=str,
)
def test_micro_batches_add_up_and_are_divided_once(
    gloo: ProcessPool, shape: tuple[int, ...], divisor: float | None, options: dict[str, Any]
) -> None:
    size = torch.Size(shape).numel()
    net = _model()
    for micro_batch in range(3):
        for rank in range(size):
            ((net(_batch(10 * micro_batch + rank)) * net.scale).square().sum() / (divisor or size)).backward()
    for found in gloo.run(_gradients, shape, options, divisor, world_size=size):
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)


def _evaluate_without_training(chosen: tuple[int, ...]) -> tuple[bool, bool]:
    """Each rank evaluates one block, all of which have the same shape."""
    net = _model()
    mode = make_mode("fsdp", mesh_of((2,)), ModeOptions(wrap_policy=(nn.Sequential,)))
    mode.prepare(net)
    mode.watch(net)  # type: ignore[attr-defined]
    order = mode.call_log
    assert order is not None
    with torch.no_grad():
        net[chosen[dist.get_rank()]](_batch(0))
    assert order.notes()[1]
    mode.finish_evaluation()
    assert not order.notes()[1]
    mode.attach(net, [torch.optim.SGD(net.parameters(), lr=0.1)])
    is_kept = mode.call_log is order
    (net(_batch(dist.get_rank())) * net.scale).sum().backward()
    mode.finish_gradients()
    mode.close()
    return is_kept, mode.call_log is None


def test_evaluations_without_a_training_are_compared(gloo: ProcessPool) -> None:
    assert gloo.run(_evaluate_without_training, (1, 1), world_size=2) == [(True, True)] * 2
    gloo.expect_error_on_all_ranks(
        _evaluate_without_training,
        (0, 1),
        match=r"rank 0 runs '0' \(Sequential\); rank 1 runs '1' \(Sequential\)",
        exception=RuntimeError,
        world_size=2,
    )
