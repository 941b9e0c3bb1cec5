"""Switches of a sharded model on several processes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_muon.params.layout import Layout
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.fsdp import GradientAgreement
from lightning_muon.sharding.fsdp_runtime import (
    free_unsharded,
    initialize_roots,
    set_gradient_divisor,
    set_gradient_sync,
)
from lightning_muon.sharding.modes import make_mode
from lightning_muon.sharding.shard_model import shard_model
from tests.distributed.sharding.models import (
    Net,
    assert_close,
    gradients_of,
    make_mesh,
    reference_gradients,
    shard_net,
    tokens_of_all,
)
from tests.support.processes import ProcessPool


def _forgotten(reduce_dtype: torch.dtype | None) -> list[dict[str, Tensor | None]]:
    """Gradients after a micro-batch of which all but a block's, then all, were forgotten, and a reducing one."""
    torch.manual_seed(0)
    model = Net()
    shard_net(model, make_mesh((1, 2)), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    agreement = GradientAgreement(model, make_mesh((1, 2)))
    tokens = tokens_of_all(2)[dist.get_rank()]
    parameters = dict(model.named_parameters())
    results = []
    for kept in ("blocks.0.", "nothing"):
        model.zero_grad()
        set_gradient_sync(model, False)
        model.training_step(tokens).backward()
        Layout().forget_unreduced([parameter for name, parameter in parameters.items() if not name.startswith(kept)])
        model.zero_grad()  # 0-d parameters are no business of FSDP2.
        set_gradient_sync(model, True)
        model.training_step(tokens).backward()
        agreement.finish()
        results.append(gradients_of(model))
    return results


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_gradients_that_were_not_reduced_can_be_forgotten(gloo: ProcessPool, reduce_dtype: torch.dtype | None) -> None:
    once, twice = reference_gradients(2), reference_gradients(2, repeats=2)
    some, all_of_them = gloo.run(_forgotten, reduce_dtype, world_size=2)[0]
    assert_close(all_of_them, once)
    assert_close(some, {name: (twice if name.startswith("blocks.0.") else once)[name] for name in once})


def _evaluate_then_call_the_inside() -> list[bool]:
    torch.manual_seed(0)
    model = Net()
    shard_net(model, make_mesh((1, 2)))
    initialize_roots(model)
    initialize_roots(model)
    tokens = tokens_of_all(2)[0]
    # A block is called before the root has run.
    model.blocks[0](torch.ones(2, 7)).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        model(tokens)
        model.generate(tokens)
    whole = [not isinstance(model.table.weight, DTensor)]
    free_unsharded(model)
    whole.append(not isinstance(model.table.weight, DTensor))
    model.training_step(tokens).backward()
    return whole


def test_whole_weights_are_freed_after_evaluation(gloo: ProcessPool) -> None:
    assert gloo.run(_evaluate_then_call_the_inside, world_size=2) == [[True, False]] * 2


def _thaw() -> list[bool]:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    shard_model(model, make_mesh((1, 2)), mp_policy=policy)
    initialize_roots(model)
    results = []
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        gradient = model[0][0].weight.grad
        results.append(gradient is not None and gradient.dtype == torch.float32 and bool(gradient.full_tensor().any()))
        model[0].requires_grad_(True)
    return results


def test_a_frozen_unit_can_be_thawed_under_mixed_precision(gloo: ProcessPool) -> None:
    assert gloo.run(_thaw, world_size=2) == [[False, True]] * 2


def _told_events() -> list[tuple[bool, str]]:
    model = Net()
    mode = make_mode("fsdp", make_mesh((1, 2)), ModeOptions(early_all_gather=True))
    mode.prepare(model)
    mode.attach(model, [])
    mode.mesh = mock.Mock(device_type="cuda")
    told: list[tuple[bool, str]] = []
    stream = mock.Mock(record_event=lambda: "event")
    with (
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
        mock.patch.object(FSDPModule, "set_post_optim_event", lambda unit, event: told.append((unit is model, event))),
    ):
        mode.end_step()
    return told


def test_the_root_is_told_what_its_all_gathers_wait_for(gloo: ProcessPool) -> None:
    assert gloo.run(_told_events, world_size=2) == [[(True, "event")]] * 2


def _divided(shape: tuple[int, int], divisor: float, dtype: torch.dtype | None) -> None:
    """Each unit's gradients are sum / divisor to the last bit; then the mean again."""
    mesh = make_mesh(shape)
    torch.manual_seed(0)
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    shard_model(model, mesh, mp_policy=policy)
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens = tokens_of_all(size)[rank]
    agreement = GradientAgreement(model, mesh)

    def gradients(chosen: float | None) -> dict[str, Tensor | None]:
        model.zero_grad()
        set_gradient_divisor(model, chosen)
        model.training_step(tokens).backward()
        agreement.finish(chosen)
        return gradients_of(model)

    sums, quotients, means = gradients(1.0), gradients(divisor), gradients(None)
    assert any(value is not None and value.ndim == 0 for value in sums.values())
    for name, value in sums.items():
        if value is None:
            assert quotients[name] is None and means[name] is None
            continue
        # The division happens in the dtype of the reduction, a power of two is exact in each.
        total = value if dtype is None or value.ndim == 0 else value.to(dtype)
        assert torch.equal(quotients[name], (total / divisor).to(value.dtype)), name
        tolerance = 1e-6 if dtype is None else 1e-2
        torch.testing.assert_close(means[name], value / size, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2), (4, 1)], ids=str)
def test_gradients_are_the_sum_over_the_ranks_divided_once(
    gloo: ProcessPool, shape: tuple[int, int], dtype: torch.dtype | None
) -> None:
    gloo.run(_divided, shape, 37.5, dtype, world_size=shape[0] * shape[1])


def _summed(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor | None]:
    mesh = make_mesh(shape)
    torch.manual_seed(0)
    model = Net().to(dtype)
    shard_model(model, mesh)
    agreement = GradientAgreement(model, mesh)
    size = dist.get_world_size()
    tokens = tokens_of_all(size)[dist.get_rank()]
    for last in (False, True):
        set_gradient_sync(model, last)
        set_gradient_divisor(model, size / 3)
        model.training_step(tokens).backward()
    agreement.finish(size / 3)
    # Nothing was added in between, so nothing is divided again.
    agreement.finish(5.0)
    return gradients_of(model)


@pytest.mark.parametrize("shape", [(2, 2), (1, 3)], ids=str)
def test_a_divisor_and_accumulated_gradients_in_float64(gloo: ProcessPool, shape: tuple[int, int]) -> None:
    size = shape[0] * shape[1]
    torch.manual_seed(0)
    model = Net().double()
    for _ in range(6):
        model.training_step(tokens_of_all(size).flatten(0, 1)).backward()
    for result in gloo.run(_summed, shape, torch.float64, world_size=size):
        assert_close(result, gradients_of(model))


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("inf"), float("nan")])
def test_a_divisor_must_be_positive_and_finite(divisor: float) -> None:
    with pytest.raises(ValueError, match="divisor of the gradients must be positive and finite"):
        set_gradient_divisor(nn.Linear(2, 2), divisor)
