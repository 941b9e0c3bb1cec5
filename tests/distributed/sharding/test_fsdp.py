"""Gradients under FSDP2: unused and 0-d parameters, micro-batches, divisors, evaluations."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_muon.sharding import fsdp as sharding_gradients
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.fsdp import GradientAgreement
from lightning_muon.sharding.modes import make_mode
from lightning_muon.sharding.shard_model import shard_model
from tests.distributed.sharding.models import (
    assert_close,
    gradients_of,
    make_mesh,
)
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool


def _scalar_on_one_rank() -> list[float | None]:
    mesh = make_mesh((2, 2))
    model = nn.Module()
    model.used = nn.Parameter(torch.tensor(1.0))
    model.unused = nn.Parameter(torch.tensor(1.0))
    if dist.get_rank() == 3:
        (8 * model.used).backward()
    GradientAgreement(model, mesh).finish()
    return [None if p.grad is None else p.grad.item() for p in (model.used, model.unused)]


def test_a_scalar_of_one_rank_has_the_mean_gradient(gloo: ProcessPool) -> None:
    assert gloo.run(_scalar_on_one_rank, world_size=4) == [[2.0, None]] * 4


class Branches(nn.Module):
    """Each rank uses some of the branches; one is used by none, one block by none."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3)) for _ in range(2))
        self.blocks[0][0].bias.requires_grad_(False)

    def forward(self, x: Tensor, branches: list[int]) -> Tensor:
        x = self.blocks[0](x)
        return torch.stack([self.branches[index](x).sum() for index in branches]).sum()


_BRANCHES = ([0], [0, 1])


def _use_branches(agree: bool) -> list[dict[str, Tensor | None]]:
    mesh = make_mesh((1, 2))
    torch.manual_seed(0)
    model = Branches()
    shard_model(model, mesh)
    agreement = GradientAgreement(model, mesh) if agree else None
    results = []
    x = torch.full((2, 3), dist.get_rank() + 1.0)

    def backward(branches: list[int]) -> None:
        model(x, branches).backward()
        if agreement is not None:
            agreement.finish()
        results.append(gradients_of(model))

    backward(_BRANCHES[dist.get_rank()])
    backward([0])
    model.zero_grad()
    model.blocks[0][0].bias.requires_grad_(True)
    backward([0])
    return results


def test_gradients_of_some_ranks_count_others_stay_none(gloo: ProcessPool) -> None:
    torch.manual_seed(0)
    model = Branches()

    def both(branches: tuple[list[int], list[int]]) -> dict[str, Tensor | None]:
        for rank, chosen in enumerate(branches):
            (model(torch.full((2, 3), rank + 1.0), chosen) / 2).backward()
        return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}

    expected = [both(_BRANCHES), both(([0], [0]))]
    model.zero_grad()
    model.blocks[0][0].bias.requires_grad_(True)
    expected.append(both(([0], [0])))
    for results in gloo.run(_use_branches, True, world_size=2):
        for actual, reference in zip(results, expected, strict=True):
            assert_close(actual, reference)


def _use_branches_before_torch_2_13() -> tuple[list[dict[str, Tensor | None]], int]:
    """As :func:`_use_branches`, and the most memory that a gradient of zeros took."""
    sizes = [0]
    fill = sharding_gradients._fill_with_zeros

    def watched(wholes: list[Tensor], zeros: dict[int, Tensor]) -> None:
        fill(wholes, zeros)
        sizes.extend(zero.untyped_storage().nbytes() for zero in zeros.values())

    with (
        mock.patch.object(sharding_gradients, "hasattr", return_value=False, create=True),
        mock.patch.object(sharding_gradients, "_fill_with_zeros", watched),
    ):
        return _use_branches(True), max(sizes)


def test_zeros_before_torch_2_13_take_no_memory(gloo: ProcessPool) -> None:
    expected = gloo.run(_use_branches, True, world_size=2)
    for (results, most), reference in zip(
        gloo.run(_use_branches_before_torch_2_13, world_size=2), expected, strict=True
    ):
        assert most == 4
        for actual, wanted in zip(results, reference, strict=True):
            assert_close(actual, wanted)


def _dropped() -> bool:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = make_mesh((1, 2))
    shard_model(model, mesh)
    agreement = GradientAgreement(model, mesh)
    model(torch.ones(2, 4)).sum().backward()
    agreement.finish()
    reference = weakref.ref(model)
    del model, agreement
    gc.collect()
    return reference() is None


def test_a_dropped_model_frees_its_process_groups(gloo: ProcessPool) -> None:
    assert gloo.run(_dropped, world_size=2) == [True, True]


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
    call_log = mode.call_log
    assert call_log is not None
    with torch.no_grad():
        net[chosen[dist.get_rank()]](_batch(0))
    assert call_log.all_calls.tail()[1]
    mode.finish_evaluation()
    assert not call_log.all_calls.tail()[1]
    mode.attach(net, [torch.optim.SGD(net.parameters(), lr=0.1)])
    is_kept = mode.call_log is call_log
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
