"""Formats of checkpoints; whole runs are in tests/integration/test_resume.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon import ParallelMuon
from lightning_muon.checkpoint.loading import Checkpoint, named_optimizer_state
from lightning_muon.checkpoint.saving import full_weights, numbered_optimizer_state


def _trained() -> tuple[nn.Module, ParallelMuon]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    # Groups in another order than the module's.
    optimizer = ParallelMuon([{"params": module[1:].parameters()}, {"params": module[0].parameters(), "lr": 0.5}])
    optimizer.attach(module)
    module(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def test_names_become_the_numbers_of_the_optimizer_and_back() -> None:
    module, optimizer = _trained()
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    state = {names[parameter]: state for parameter, state in optimizer.state.items()}
    named: dict[str, Any] = {"state": state, "param_groups": groups}
    numbered = numbered_optimizer_state(named, module, optimizer)
    assert [group["params"] for group in numbered["param_groups"]] == [[0, 1, 2, 3], [4, 5]]
    for number, own in optimizer.state_dict()["state"].items():
        assert all(torch.equal(numbered["state"][number][key], value) for key, value in own.items())
    again = named_optimizer_state(numbered, module, optimizer)
    assert again["state"] == state
    assert [g["params"] for g in again["param_groups"]] == [g["params"] for g in named["param_groups"]]
    assert named_optimizer_state(named, module, optimizer) == named
    with pytest.raises(ValueError, match=r"param groups of \[4, 2\] parameters, the optimizer of \[6\]"):
        named_optimizer_state(numbered, module, ParallelMuon(module.parameters()))


def test_gathered_weights_go_by_the_names_of_the_module() -> None:
    module = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager"))
    assert list(full_weights(module)) == ["0.weight", "0.bias", "1._orig_mod.weight", "1._orig_mod.bias"]


def test_weights_only_is_honoured(tmp_path: Path) -> None:
    torch.save({"state_dict": {}, "callbacks": Path("anything")}, tmp_path / "file.ckpt")
    with pytest.raises(Exception, match="weights_only"):
        Checkpoint.open(tmp_path / "file.ckpt", metadata_name="meta.pt", weights_only=True)
    content = Checkpoint.open(tmp_path / "file.ckpt", metadata_name="meta.pt", weights_only=False).content
    assert content["callbacks"] == Path("anything")


def test_a_state_of_version_0_1_goes_on_with_its_rate() -> None:
    model = nn.Linear(3, 4)
    optimizer = ParallelMuon(model.named_parameters(), muon_lr_factor=3.0)
    for saved, expected in ((2.0, 2.0), (None, 1.0)):
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            group["muon_lr_factor"] = saved
            if saved is None:
                del group["muon_lr_factor"]
        named = named_optimizer_state(state, model, optimizer)
        assert [group["muon_lr_factor"] for group in named["param_groups"]] == [expected]
