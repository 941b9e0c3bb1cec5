"""States of other optimizers that ParallelMuon takes, and those that it refuses."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon import ParallelMuon
from tests.reference.other_muons import DionMuon
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
    with pytest.warns(UserWarning, match=r"2 matrices \(0.weight, ...\) have trained with AdamW"):
        optimizer.load_state_dict(saved)
    found = optimizer.state_dict()
    assert all(torch.equal(found["state"][n]["momentum_buffer"], saved["state"][n]["exp_avg"]) for n in (0, 2))
    assert found["state"][0].keys() == {"momentum_buffer"}
    assert all(torch.equal(found["state"][1][key], value) for key, value in saved["state"][1].items())
    (group,) = found["param_groups"]
    assert (group["lr"], group["adamw_eps"], group["eps"]) == (0.03, 1e-6, 1e-7)


@pytest.mark.parametrize(("adjust_lr", "rule"), [("rms_norm", "match_rms_adamw"), ("spectral_norm", "spectral_mup")])
def test_the_sums_of_dion_become_averages(adjust_lr: str, rule: str) -> None:
    layer = nn.Linear(7, 5, bias=False)
    saved = _trained(DionMuon([{"params": list(layer.parameters()), "mu": 0.75}], adjust_lr=adjust_lr)).state_dict()
    optimizer = ParallelMuon(layer.parameters(), adjust_lr_fn="match_rms_adamw")
    optimizer.load_state_dict(saved)
    found = optimizer.state_dict()
    assert torch.equal(found["state"][0]["momentum_buffer"], saved["state"][0]["momentum"] / 4)
    (group,) = found["param_groups"]
    assert (group["lr"], group["momentum"], group["nesterov"], group["adjust_lr_fn"]) == (0.01, 0.75, False, rule)


def test_a_rule_of_dion_for_convolutions_is_left_out() -> None:
    layer = nn.Conv1d(7, 5, 3, bias=False)
    saved = DionMuon([{"params": list(layer.parameters())}], adjust_lr="spectral_norm").state_dict()
    optimizer = ParallelMuon(layer, lr=0.3)
    with pytest.warns(UserWarning, match="adjust_lr='spectral_norm' has no counterpart"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.3


_KELLER_JORDAN = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
_DION = {"mu": 0.9, "epsilon": 1e-8, "lr": 0.1, "adjust_lr": None, "nesterov": True, "step": 2, "cautious_wd": False}
_MOMENTUM = {"momentum_buffer": torch.zeros(7, 5)}


@pytest.mark.parametrize(
    ("group", "states", "match"),
    [
        (_KELLER_JORDAN, {0: _MOMENTUM}, "1 of 2 momenta are missing"),
        (_KELLER_JORDAN | {"nesterov": True, "ns_steps": 5}, {0: _MOMENTUM}, "before May 2025"),
        ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "dampening": 0.0}, {0: _MOMENTUM}, "is not known, has"),
        (_DION | {"algorithm": "normuon"}, {0: {"momentum": torch.zeros(7, 5), "variance_neuron": 0}}, "of dion, has"),
        (_DION | {"algorithm": "muon", "cautious_wd": True}, {}, "cautious_wd=True"),
    ],
)
def test_a_state_that_cannot_be_translated_is_refused(
    group: dict[str, Any], states: dict[int, Any], match: str
) -> None:
    optimizer = ParallelMuon([nn.Parameter(torch.randn(7, 5)), nn.Parameter(torch.randn(7, 5))])
    before = optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict({"state": states, "param_groups": [group | {"params": [0, 1]}]})
    assert optimizer.param_groups[0]["lr"] == before
