"""Fails when a private name of Lightning, Accelerate or transformers moves."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands import launch
from torch import nn

from lightning_muon.compat.accelerate import in_place_of_states, launch_on_cpus
from lightning_muon.compat.lightning import (
    LightningPackage,
)
from lightning_muon.compat.transformers import ShardedAtLoad, pretrained_parts
from tests.integration.training import PACKAGES
from tests.support.accelerate_cpu import fresh_accelerate


@pytest.fixture
def package(name: Any) -> LightningPackage:
    pytest.importorskip(name)
    return LightningPackage(name)


@pytest.mark.parametrize("name", PACKAGES)
def test_names_that_are_assigned_exist(package: LightningPackage) -> None:
    strategy = package.module("strategies").ModelParallelStrategy()
    assert callable(strategy._setup_distributed)
    assert strategy._device_mesh is None and strategy._layer_sync is None
    assert package.module().LightningModule()._device_mesh is None
    assert hasattr(package.fabric("strategies").FSDPStrategy(accelerator=None), "_backward_sync_control")


def test_after_an_error_everything_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def fail(folder: str, with_model: bool) -> None:
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


def test_only_loaded_weights_are_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=4, intermediate_size=6, num_hidden_layers=1, num_attention_heads=1
    )
    kind = transformers.AutoModelForCausalLM
    kind.from_config(config).save_pretrained(tmp_path)
    fresh = kind.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    loaded = kind.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert pretrained_parts(nn.ModuleList([fresh, nn.Linear(2, 2)])) == []
    assert pretrained_parts(nn.ModuleList([fresh, loaded])) == [loaded] == pretrained_parts(loaded)


def test_what_a_trainer_overrides_is_there() -> None:
    kind = pytest.importorskip("transformers").Trainer
    own = [name for name, value in vars(ShardedAtLoad).items() if re.match("_[^_]", name) and callable(value)]
    assert len(own) == 3 and all(callable(getattr(kind, name)) for name in own)
