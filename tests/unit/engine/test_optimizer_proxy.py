"""The optimizer of the user after another one has taken its place."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from lightning_muon import ParallelMuon
from lightning_muon.engine.conversion import OptimizerProxy


def _replaced() -> tuple[nn.Linear, torch.optim.AdamW, ParallelMuon, OptimizerProxy]:
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    given = torch.optim.AdamW(module.parameters(), lr=0.5)
    used = ParallelMuon([{"params": [module.weight]}, {"params": [module.bias], "algorithm": "adamw"}], lr=0.5)
    return module, given, used, OptimizerProxy(given, used)


def test_a_scheduler_of_the_given_optimizer_sets_the_rates_of_the_other() -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    given = torch.optim.AdamW(module.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given, gamma=0.5)
    used = ParallelMuon(module.parameters(), lr=0.5)
    handle = OptimizerProxy(given, used)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rate in (0.5, 0.25, 0.125):
            assert [group["lr"] for group in used.param_groups] == [rate]
            handle.follow()
            scheduler.step()


def test_following_changes_nothing() -> None:
    module, given, used, handle = _replaced()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    handle.follow()
    assert all(map(torch.equal, before, module.parameters()))
    assert not given.state
    assert given.param_groups is used.param_groups


def test_a_step_of_the_given_optimizer_is_an_error() -> None:
    _, given, _, handle = _replaced()
    handle.follow()
    with pytest.raises(RuntimeError, match="AdamW does nothing any more: a ParallelMuon has taken its place"):
        given.step()


def test_zero_grad_of_either_clears_the_gradients() -> None:
    module, given, _, _ = _replaced()
    module.weight.grad = torch.ones_like(module.weight)
    given.zero_grad()
    assert module.weight.grad is None


def test_rates_stay_shared_when_a_state_is_loaded() -> None:
    _, given, used, _ = _replaced()
    saved = used.state_dict()
    saved["param_groups"][0]["lr"] = 0.125
    used.load_state_dict(saved)
    assert given.param_groups[0]["lr"] == 0.125
    given.param_groups[0]["lr"] = 0.25
    assert used.param_groups[0]["lr"] == 0.25
