"""Fails when a private name of torch moves, or means something else, and no training would tell."""

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_muon.compat.torch import new_group, world_timeout

_SECONDS = timedelta(seconds=77)


def test_a_new_group_has_its_name_and_splits_no_other() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=_SECONDS)
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
    with pytest.raises(ValueError, match="already been"):
        new_group([0], "ours", backend="gloo", timeout=_SECONDS)
    assert world.bound_device_id == torch.device("cuda", 0)
    dist.destroy_process_group()
