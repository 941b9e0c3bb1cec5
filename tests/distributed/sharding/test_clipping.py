"""Clipping has torch's numbers on any mesh."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_muon.sharding.clipping import clip_norm_, clip_value_
from tests.support.processes import ProcessPool
from tests.support.tensors import are_equal, whole

_SHAPES = {"rows": (13, 7), "bias": (5,), "replicated": (3, 4), "few": (1, 9), "cube": (2, 3, 5), "factor": ()}


def _whole() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in _SHAPES.values()]


def _with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def _parameters() -> dict[str, Tensor]:
    """The same gradients: plain, on a 2-D and on a 1-D mesh, uneven and empty shards, one without gradient."""
    size = dist.get_world_size()
    two = init_device_mesh("cpu", (2, 2) if size == 4 else (1, size), mesh_dim_names=("replicate", "shard"))
    one = init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    layouts: list[Any] = [
        (two, [Replicate(), Shard(0)]), (one, [Shard(0)]), (two, [Replicate(), Replicate()]),
        (one, [Shard(0)]), (two, [Replicate(), Shard(1)]), None,
    ]  # fmt: skip
    parameters: dict[str, Tensor] = {
        name: _with_gradient(gradient if layout is None else distribute_tensor(gradient, *layout))
        for name, gradient, layout in zip(_SHAPES, _whole(), layouts, strict=True)
    }
    return {**parameters, "unused": nn.Parameter(distribute_tensor(torch.ones(3, 3), one, [Shard(0)]))}


def _expected(max_norm: float) -> tuple[Tensor, list[Tensor]]:
    parameters = [_with_gradient(gradient) for gradient in _whole()]
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm, [parameter.grad for parameter in parameters]  # type: ignore[misc]


def _full_gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [whole(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _clip_all(max_norm: float) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    by_norm, by_value = list(_parameters().values()), list(_parameters().values())
    norm = clip_norm_(by_norm, max_norm)
    clip_value_(by_value, 0.25)
    found = norm, _full_gradients(by_norm), _full_gradients(by_value)
    for parameter in by_norm if dist.get_rank() == 1 else []:
        parameter.grad = None
    clip_norm_(by_norm, 1.0)  # No rank waits for one without gradients.
    return found


@pytest.mark.parametrize(("world_size", "max_norm"), [(1, 0.5), (4, 0.5), (4, 1000.0)])
def test_mixed_meshes_are_clipped_like_one_process(gloo: ProcessPool, max_norm: float, world_size: int) -> None:
    norm, gradients = _expected(max_norm)
    clamped = [gradient.clamp(-0.25, 0.25) for gradient in _whole()]
    for found, by_norm, by_value in gloo.run(_clip_all, max_norm, world_size=world_size):
        # Sums of squares in another order.
        torch.testing.assert_close(found, norm, rtol=1e-6, atol=0)
        torch.testing.assert_close(by_norm, gradients, rtol=1e-6, atol=0)
        assert are_equal(by_value, clamped)


@pytest.mark.parametrize("bad", [float("nan"), 3e38])
def test_a_broken_gradient_stays_recognizable(bad: float) -> None:
    good, broken = _with_gradient(torch.ones(2)), _with_gradient(torch.full((2,), bad))
    assert not clip_norm_([good, broken], 0.1).isfinite()
    assert torch.equal(whole(good.grad), torch.ones(2))
    torch.testing.assert_close(broken.grad, torch.full((2,), bad), rtol=0, atol=0, equal_nan=True)
    mixed = _with_gradient(torch.tensor([float("nan"), 2.0, -2.0]))
    clip_value_([mixed], 1.0)
    assert torch.equal(whole(mixed.grad).nan_to_num(9.0), torch.tensor([9.0, 1.0, -1.0]))


def test_dtypes_are_clipped_together() -> None:
    dtypes = [torch.bfloat16, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float32]
    gradients = [gradient.to(dtype) for gradient, dtype in zip(_whole(), dtypes, strict=True)]
    expected = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
    parameters = [_with_gradient(gradient.clone()) for gradient in gradients]
    norm = clip_norm_(parameters, 0.5)
    torch.testing.assert_close(norm, expected.float(), rtol=1e-6, atol=0)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        # The factor and the product are rounded to the dtype of the gradient.
        tolerance = 2 * torch.finfo(gradient.dtype).eps
        torch.testing.assert_close(
            whole(parameter.grad).double(), gradient.double() * (0.5 / expected), rtol=max(tolerance, 1e-6), atol=1e-7
        )
