"""The private names of torch that the package leans on still exist and still mean the same."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard

from lightning_muon.compat.torch import (
    at_end_of_backward,
    collective_counts,
    cpu_multiplies_bfloat16_fast,
    drop_unreduced_gradients,
    forward_resharding,
    has_unfinished_backward,
    has_unfinished_forward,
    inherit_timeout,
    init_fsdp_root,
    is_in_backward,
    local_shape_and_offset,
    new_group,
    process_groups,
    reset_fsdp,
    reset_fsdp_by_hand,
    set_forward_resharding,
    shards_over_one_rank,
    world_timeout,
)

_SECONDS = timedelta(seconds=77)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=_SECONDS)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_flags_of_the_cpu_are_booleans() -> None:
    assert isinstance(torch.cpu._is_amx_tile_supported(), bool) and isinstance(cpu_multiplies_bfloat16_fast(), bool)


def test_the_shard_of_any_rank_can_be_asked_for() -> None:
    # 13 rows over 4 ranks: 4, 4, 4, 1; a second axis only replicates.
    found = [local_shape_and_offset((13, 7), (2, 4), (1, rank), [Replicate(), Shard(0)]) for rank in range(4)]
    assert found == [((4, 7), (0, 0)), ((4, 7), (4, 0)), ((4, 7), (8, 0)), ((1, 7), (12, 0))]


def test_a_root_can_be_initialized_before_its_first_forward(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=mesh)
    root = fully_shard(model, mesh=mesh)
    model[0](torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="already been lazily initialized"):
        init_fsdp_root(root)
    fresh = nn.Sequential(fully_shard(nn.Linear(2, 2), mesh=mesh))
    init_fsdp_root(fully_shard(fresh, mesh=mesh))
    fresh[0](torch.ones(1, 2))
    fresh(torch.ones(1, 2))


@pytest.mark.usefixtures("mesh")
def test_collectives_are_counted_by_group() -> None:
    assert process_groups() == [dist.group.WORLD]
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    before = collective_counts()[name]
    dist.all_reduce(torch.ones(1))
    assert collective_counts() == {name: before + 1}


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


def test_resharding_after_forward_can_be_read_and_put_back(mesh: DeviceMesh) -> None:
    unit = fully_shard(nn.Linear(2, 2), mesh=mesh)
    saved = forward_resharding(unit)
    unit.set_reshard_after_forward(False)
    assert forward_resharding(unit) == [None] and saved != [None]
    set_forward_resharding(unit, saved)
    assert forward_resharding(unit) == saved
    assert shards_over_one_rank(unit)
    assert not shards_over_one_rank(fully_shard(nn.Sequential(), mesh=mesh))


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


def test_the_end_of_backward_comes_after_all_hooks() -> None:
    calls: list[str] = []

    def hook(_: torch.Tensor) -> None:
        calls.append("hook")
        at_end_of_backward(lambda: calls.append("end"))

    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(hook)
    (weights[0] * weights[1]).sum().backward()

    assert calls == ["hook", "hook", "end", "end"]


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
    output.register_hook(look)
    with pytest.raises(ValueError):
        output.sum().backward()
    assert seen[0] == (False, True, False) and seen[1][:2] == (True, False)
    output = model(torch.ones(1, 2))
    model[1].weight.register_hook(look)
    with pytest.raises(ValueError):
        output.sum().backward()
    assert seen[2] == (True, False, True) and has_unfinished_backward(root)
    reset(root)
    assert not has_unfinished_backward(root) and not is_in_backward()
