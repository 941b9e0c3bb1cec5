"""Fails when a private name of torch, Lightning, Accelerate or transformers moves, or means something else."""

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.commands import launch
from torch import nn

from lightning_muon.compat.accelerate import in_place_of_states, launch_on_cpus
from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.compat.torch import new_group, world_timeout
from lightning_muon.compat.transformers import ShardedAtLoad
from tests.integration.training import PACKAGES
from tests.support.accelerate_cpu import fresh_accelerate


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> LightningPackage:
    pytest.importorskip(request.param)
    return LightningPackage(request.param)


def test_names_of_lightning_that_are_assigned_exist(package: LightningPackage) -> None:
    strategy = package.module("strategies").ModelParallelStrategy()
    assert callable(strategy._setup_distributed)
    assert strategy._device_mesh is None and strategy._layer_sync is None
    assert package.module().LightningModule()._device_mesh is None
    assert hasattr(package.fabric("strategies").FSDPStrategy(accelerator=None), "_backward_sync_control")


def test_after_an_error_everything_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def fail(folder: str) -> None:
        raise OSError(folder)

    with fresh_accelerate({"ACCELERATE_TORCH_DEVICE": "cpu"}):
        accelerator: Any = Accelerator()
        assert accelerator._models == accelerator._optimizers == []
        model = accelerator.prepare(nn.Linear(2, 2))
        assert model._is_accelerate_prepared
        for directory in (tmp_path, tmp_path / "missing"):  # After the action began, and before it.
            with pytest.raises((OSError, ValueError)), in_place_of_states(accelerator, "load", fail):
                accelerator.load_state(str(directory))
            assert accelerator._models == [model]
            assert not accelerator._load_model_state_pre_hook


def test_processes_on_cpus_follow_the_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    config = tmp_path / "config.yaml"
    config.write_text("{distributed_type: MULTI_CPU, use_cpu: true, num_processes: 3}")
    monkeypatch.setattr(launch, "multi_gpu_launcher", lambda arguments: seen.append((arguments, dict(os.environ))))
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    launch_on_cpus(launch.launch_command_parser().parse_args(["--config_file", str(config), "a.py", "--x"]))
    ((arguments, environment),) = seen
    assert (arguments.num_processes, arguments.training_script, arguments.training_script_args) == (3, "a.py", ["--x"])
    assert environment["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_USE_CPU" not in os.environ


def test_what_a_trainer_overrides_is_there() -> None:
    kind = pytest.importorskip("transformers").Trainer
    own = [name for name, value in vars(ShardedAtLoad).items() if re.match("_[^_]", name) and callable(value)]
    assert len(own) == 3 and all(callable(getattr(kind, name)) for name in own)


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
