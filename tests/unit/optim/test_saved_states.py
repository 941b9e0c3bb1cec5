"""States of other optimizers and of version 0.1 that are taken, and those that are refused."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_muon import FlexDeMo, ParallelMuon
from lightning_muon.removed import REMOVED, STATE_OF
from tests.support.tensors import set_gradients


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6, bias=False), nn.Linear(6, 2, bias=False))


def _trained(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for step in range(2):
        set_gradients([p for group in optimizer.param_groups for p in group["params"]], step)
        optimizer.step()
    return optimizer


def test_matrices_go_on_with_the_first_moments_of_adamw() -> None:
    saved = _trained(torch.optim.AdamW(_net().parameters(), lr=0.03, eps=1e-6)).state_dict()
    optimizer = ParallelMuon(_net())
    with pytest.warns(UserWarning, match=r"2 matrices \(0.weight, ...\) moved from AdamW to Muon"):
        optimizer.load_state_dict(saved)
    found = optimizer.state_dict()
    assert all(torch.equal(found["state"][n]["momentum_buffer"], saved["state"][n]["exp_avg"]) for n in (0, 2))
    assert found["state"][0].keys() == {"momentum_buffer"}
    assert all(torch.equal(found["state"][1][key], value) for key, value in saved["state"][1].items())
    (group,) = found["param_groups"]
    assert (group["lr"], group["adamw_eps"], group["eps"]) == (0.03, 1e-6, 1e-7)


@pytest.mark.parametrize(
    ("group", "match"),
    [
        ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "dampening": 0.0}, "not known, with .*'dampening'"),
        ({"lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8, "amsgrad": True}, "saved with amsgrad=True"),
        ({"lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8, "amsgrad": False, "maximize": True}, "saved with maximize=True"),
    ],
)
def test_a_state_that_cannot_be_translated_is_refused(group: dict[str, Any], match: str) -> None:
    optimizer = ParallelMuon([nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(7, 5))])
    before = optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict({"state": {}, "param_groups": [group | {"params": [0, 1]}]})
    assert optimizer.param_groups[0]["lr"] == before


def test_values_that_are_gone_become_those_of_the_program() -> None:
    saved = ParallelMuon(_net().parameters()).state_dict()
    saved["param_groups"][0].update(ns_quality=(0.85, 1.15), ns_coefficients="deepseek_v4", ns_steps=10, momentum=0.5)
    optimizer = ParallelMuon(_net().parameters(), ns_steps=4)
    gone = r"with the options of this program; ns_coefficients='deepseek_v4' went in .*; ns_quality=\(\.\.\.\) went in "
    with pytest.warns(UserWarning, match=gone):
        optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert (group["ns_quality"], group["ns_steps"], group["momentum"]) == ("reference", 4, 0.5)


@pytest.mark.parametrize("kind", [ParallelMuon, FlexDeMo])
def test_options_that_are_gone_are_left_out(kind: Any) -> None:
    saved = _trained(kind(_net().parameters())).state_dict()
    saved["param_groups"][0] |= {"curvature": False, "hyperball": False, "muon_eq": "none", "muon_plus": "none"}
    for state in saved["state"].values():
        state["curvature_buffer"] = torch.ones(3)
    optimizer = kind(_net().parameters())
    with (
        mock.patch.dict(REMOVED, curvature="nobody needed it"),
        mock.patch.dict(STATE_OF, curvature_buffer="curvature"),
        pytest.warns(UserWarning, match="of version 0.1; .* of this program; curvature went in .*: nobody needed it$"),
    ):
        optimizer.load_state_dict(saved)
    assert "curvature" not in optimizer.param_groups[0]
    for number, state in optimizer.state_dict()["state"].items():
        assert state.keys() == saved["state"][number].keys() - {"curvature_buffer"}
        assert all(torch.equal(value, saved["state"][number][key]) for key, value in state.items())
