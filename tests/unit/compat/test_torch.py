"""Fails when a private name of torch moves, or means something else."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_muon.compat import torch as compat
from lightning_muon.compat.torch import (
    accumulate_gradients,
    drop_unreduced_gradients,
    finish_reducing,
    forget_forward,
    has_unfinished_backward,
    has_unfinished_forward,
    inherit_timeout,
    is_in_backward,
    new_group,
    overwritten_weights,
    profiled,
    reset_fsdp,
    reset_fsdp_by_hand,
    start_reducing,
    unreduced_gradients,
    world_timeout,
)
from lightning_muon.pipeline.backward import backward_input, backward_weight

_SECONDS = timedelta(seconds=77)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=_SECONDS)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_ranges_are_recorded_by_a_profiler_and_cost_nothing_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, profiled("gather", "0.3"):
        pass
    assert [each.key for each in profile.key_averages()] == ["lightning_muon::gather[0.3]"]
    monkeypatch.setattr(compat, "record_function", lambda _: pytest.fail("no profiler runs"))
    with profiled("gather", "0.3"):
        pass


@pytest.mark.usefixtures("mesh")
def test_a_group_gets_the_timeout_of_the_default_group() -> None:
    group: Any = dist.new_group([0])
    assert group._get_backend(torch.device("cpu")).options._timeout != _SECONDS
    inherit_timeout(group)
    assert group._get_backend(torch.device("cpu")).options._timeout == _SECONDS


@pytest.mark.usefixtures("mesh")
def test_a_new_group_has_its_name_and_splits_no_other() -> None:
    world: Any = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", 0)
    with mock.patch.object(dist.distributed_c10d, "_get_split_source", side_effect=AssertionError) as split:
        with pytest.raises(AssertionError):
            dist.new_group([0], use_local_synchronization=True)
        split.reset_mock()
        group: Any = new_group([0], "ours", backend="gloo", timeout=world_timeout())
        split.assert_not_called()
    assert world.bound_device_id == torch.device("cuda", 0)
    assert group.group_name == "ours"
    assert dist.get_process_group_ranks(group) == [0] and dist.get_rank(group) == 0
    assert group._get_backend(torch.device("cpu")).options._timeout == _SECONDS
    assert dist.get_backend_config(group) == "cpu:gloo,cuda:gloo"
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    with pytest.raises(ValueError, match="already been"):
        new_group([0], "ours", backend="gloo", timeout=_SECONDS)
    assert world.bound_device_id == torch.device("cuda", 0)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_gradients_without_reduction_can_be_dropped(mesh: DeviceMesh, reduce_dtype: torch.dtype | None) -> None:
    unit = fully_shard(nn.Linear(2, 2), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    drop_unreduced_gradients(unit, unit.parameters())  # Before the first forward there is nothing.
    for is_reduced in (False, True):
        unit.set_requires_gradient_sync(is_reduced)
        unit(torch.ones(3, 2)).sum().backward()
        drop_unreduced_gradients(unit, [] if is_reduced else [unit.weight])
    assert unit.weight.grad.full_tensor().tolist() == [[3.0, 3.0]] * 2
    assert unit.bias.grad.full_tensor().tolist() == [6.0, 6.0]


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_gathered_weights_that_were_written_to_are_named(mesh: DeviceMesh, param_dtype: torch.dtype | None) -> None:
    unit = fully_shard(nn.Linear(7, 13), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
    assert overwritten_weights(unit) == []  # Nothing is gathered yet.
    unit.unshard()
    assert overwritten_weights(unit) == []
    unit.weight.data[12, 6] = 2.0
    assert overwritten_weights(unit) == ["weight"]
    unit.reshard()
    assert overwritten_weights(unit) == []


def test_a_forward_that_was_stopped_is_forgotten(mesh: DeviceMesh) -> None:
    unit = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        unit(torch.ones(1, 3))
    assert has_unfinished_forward(unit)
    forget_forward(unit)
    assert not has_unfinished_forward(unit)


@pytest.mark.parametrize("reset", [reset_fsdp, reset_fsdp_by_hand])
def test_a_pass_that_has_raised_is_seen_and_undone(mesh: DeviceMesh, reset: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=mesh)
    root = fully_shard(model, mesh=mesh)
    seen: list[tuple[bool, bool, bool]] = []

    def look(*_: Any) -> None:
        seen.append((is_in_backward(), has_unfinished_forward(root), has_unfinished_backward(root)))
        raise ValueError

    hook = model[0].register_forward_hook(look)
    with pytest.raises(ValueError):
        model(torch.ones(1, 2))
    hook.remove()
    assert has_unfinished_forward(root)
    reset(root)
    output = model(torch.ones(1, 2))
    model[1].weight.register_hook(look)
    with pytest.raises(ValueError):
        output.sum().backward()
    assert seen == [(False, True, False), (True, False, True)] and has_unfinished_backward(root)
    reset(root)
    assert not has_unfinished_backward(root) and not is_in_backward()


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _expected(x: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    net, leaf = _net(), x.detach().clone().requires_grad_()
    net(leaf).backward(gradient)
    return leaf.grad, [parameter.grad for parameter in net.parameters()]  # type: ignore[return-value]


@pytest.mark.parametrize("num_passes", [1, 3])
def test_weight_gradients_are_summed_in_the_dtype_of_reductions(mesh: DeviceMesh, num_passes: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    root = fully_shard(_net(), mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(False)
    for _ in range(num_passes):
        leaf = torch.randn(5, 3).requires_grad_()
        _, rest = backward_input([root(leaf)], [torch.randn(5, 2).bfloat16()], [leaf])
        backward_weight(rest)
        accumulate_gradients(root)
        assert [each.dtype for each in unreduced_gradients(root)] == [torch.float32] * 4


@pytest.mark.parametrize("is_split", [False, True])
def test_the_sum_of_unreduced_gradients_is_reduced_on_demand(mesh: DeviceMesh, is_split: bool) -> None:
    x, gradient = torch.randn(5, 3), torch.randn(5, 2)
    _, expected = _expected(x, gradient)
    net = _net()
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    root = fully_shard(net, mesh=mesh, reshard_after_forward=False)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(False)
    assert unreduced_gradients(root) == []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        if is_split:
            _, rest = backward_input([net(leaf)], [gradient], [leaf])
            backward_weight(rest)
        else:
            net(leaf).backward(gradient)
    found = unreduced_gradients(root)
    assert len(found) == 4
    for each in found:
        each.mul_(0.5)
    start_reducing(root)
    finish_reducing(root)
    assert unreduced_gradients(root) == []
    for parameter, wanted in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted)  # type: ignore[union-attr]
