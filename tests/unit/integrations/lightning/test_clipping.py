"""Clipping: torch's numbers, for parameters on any mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_muon.integrations.lightning.clipping import clip_norm_, clip_value_, total_norm
from tests.support.processes import ProcessPool

_SHAPES = [(13, 7), (5,), (3, 4), (1, 9), (2, 3, 5), ()]


def _whole() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in _SHAPES]


def _parameters() -> list[Tensor]:
    """The same gradients: plain, on a 2-D and on a 1-D mesh, uneven and empty shards, one without gradient."""
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    one = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    layouts: list[Any] = [
        (two, [Replicate(), Shard(0)]), (one, [Shard(0)]), (two, [Replicate(), Replicate()]),
        (one, [Shard(0)]), (two, [Replicate(), Shard(1)]), None,
    ]  # fmt: skip
    parameters: list[Tensor] = []
    for gradient, layout in zip(_whole(), layouts, strict=True):
        placed = gradient if layout is None else distribute_tensor(gradient, *layout)
        parameter = nn.Parameter(torch.zeros_like(placed))
        parameter.grad = placed
        parameters.append(parameter)
    return [*parameters, nn.Parameter(distribute_tensor(torch.ones(3, 3), one, [Shard(0)]))]


def _expected(max_norm: float) -> tuple[Tensor, list[Tensor]]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in _whole()]
    for parameter, gradient in zip(parameters, _whole(), strict=True):
        parameter.grad = gradient
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm, [parameter.grad for parameter in parameters]  # type: ignore[misc]


def _full(parameters: list[Tensor]) -> list[Tensor]:
    return [
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parameters if p.grad is not None
    ]  # type: ignore[union-attr,misc]


def _clip(max_norm: float) -> tuple[Tensor, list[Tensor]]:
    parameters = _parameters()
    norm = clip_norm_(parameters, max_norm)
    return norm, _full(parameters)


@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_mixed_meshes_give_the_norm_and_the_gradients_of_one_process(gloo: ProcessPool, max_norm: float) -> None:
    norm, gradients = _expected(max_norm)
    for rank_norm, rank_gradients in gloo.run(_clip, max_norm):
        # Sums of squares in another order.
        torch.testing.assert_close(rank_norm, norm, rtol=1e-6, atol=0)
        torch.testing.assert_close(rank_gradients, gradients, rtol=1e-6, atol=0)


def _clip_values() -> list[Tensor]:
    parameters = _parameters()
    clip_value_(parameters, 0.25)
    return _full(parameters)


def test_clipping_by_value_is_exact(gloo: ProcessPool) -> None:
    expected = [gradient.clamp(-0.25, 0.25) for gradient in _whole()]
    for gradients in gloo.run(_clip_values):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True))


def _missing_on_one_rank() -> Tensor:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    if dist.get_rank() == 0:
        parameter.grad = torch.ones_like(parameter)
    return total_norm([parameter])


def test_a_gradient_that_one_rank_lacks_counts_as_zero(gloo: ProcessPool) -> None:
    assert [norm.item() for norm in gloo.run(_missing_on_one_rank, world_size=2)] == pytest.approx([2**0.5] * 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_gradient_stays_recognizable(bad: float) -> None:
    good, broken = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    good.grad, broken.grad = torch.ones(2), torch.tensor([bad, 1.0])
    clip_norm_([good, broken], 0.1)
    assert torch.equal(good.grad, torch.ones(2))


def test_no_parameters_have_norm_zero() -> None:
    assert total_norm([]) == 0
    assert clip_norm_([nn.Parameter(torch.zeros(1), requires_grad=False)], 1.0) == 0
