"""Fails when a private name of Accelerate moves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands import launch
from torch import nn

from lightning_muon.compat.accelerate import (
    add_optimizer,
    in_place_of_states,
    is_prepared,
    launch_on_cpus,
    prepared_models,
)
from tests.support.accelerate_cpu import fresh_accelerate


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with fresh_accelerate({"ACCELERATE_TORCH_DEVICE": "cpu"}):
        yield Accelerator()


def test_prepared_objects_are_known(accelerator: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert prepared_models(accelerator) == [] and not is_prepared(model)
    model = accelerator.prepare(model)
    assert prepared_models(accelerator) == [model] and is_prepared(model)
    add_optimizer(accelerator, optimizer)
    assert accelerator.prepare(optimizer) is optimizer and is_prepared(optimizer)
    accelerator.free_memory()
    assert prepared_models(accelerator) == []


def test_an_action_takes_the_place_of_models_and_optimizers(accelerator: Any, tmp_path: Path) -> None:
    seen: list[Any] = []
    model = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append(("save", list(models))))
    accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(("load", accelerator._models[:])))
    for when in ("save", "load"):
        with in_place_of_states(accelerator, when, lambda *arguments: seen.append(arguments)):
            getattr(accelerator, f"{when}_state")(str(tmp_path))
        assert accelerator._models == [model] and accelerator._optimizers == [optimizer]
    assert seen == [(str(tmp_path), True), ("save", [model]), (str(tmp_path), True), ("load", [model])]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["random_states_0.pkl", "scheduler.bin"]
    assert accelerator._schedulers == [scheduler]


@pytest.mark.parametrize("takes", [False, True])
def test_hooks_may_take_what_they_are_offered_before_the_action(accelerator: Any, tmp_path: Path, takes: bool) -> None:
    seen: list[Any] = []
    model, _ = accelerator.prepare(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters(), lr=0.1))

    def hook(*arguments: Any) -> None:
        offered = arguments[-2]
        seen.append((arguments[0] is accelerator._models, list(offered)))
        if takes:
            offered.pop()

    accelerator.register_save_state_pre_hook(hook)
    accelerator.register_load_state_pre_hook(hook)
    for when, offered in (("save", model.state_dict()), ("load", model)):
        act = lambda *arguments: seen.append(arguments)  # noqa: E731
        with in_place_of_states(accelerator, when, act, lambda offered=offered: [offered]):  # type: ignore[arg-type]
            getattr(accelerator, f"{when}_state")(str(tmp_path))
        assert seen == [(when == "save", [offered]), (str(tmp_path), not takes)]
        seen.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["random_states_0.pkl"]
    assert accelerator._models == [model]
    assert list(accelerator._save_model_state_pre_hook.values()) == [hook]


def test_after_an_error_everything_is_as_before(accelerator: Any, tmp_path: Path) -> None:
    model = accelerator.prepare(nn.Linear(2, 2))

    def fail(folder: str, with_model: bool) -> None:
        raise OSError(folder)

    for directory in (tmp_path, tmp_path / "missing"):  # After the action began, and before it.
        with pytest.raises((OSError, ValueError)), in_place_of_states(accelerator, "load", fail):
            accelerator.load_state(str(directory))
        assert prepared_models(accelerator) == [model]
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
