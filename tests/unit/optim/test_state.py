"""State: lost, saved and loaded, of other optimizers and of version 0.1."""

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from lightning_muon import FlexDeMo, ParallelMuon
from tests.support.tensors import are_equal, set_gradients


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6), nn.Linear(6, 3, bias=False))


def _lose(how: str, optimizer: Any, net: Any) -> None:
    if how == "clear":
        optimizer.state.clear()
    elif how == "replace":
        optimizer.state = {} if isinstance(optimizer, ParallelMuon) else defaultdict(dict)
    else:
        for parameter in (net[1].weight, net[0].bias):
            optimizer.state.pop(parameter, None)


@pytest.mark.parametrize("how", ["clear", "replace", "pop"])
def test_state_that_is_lost_begins_with_zeros_as_in_torch(how: str) -> None:
    mine, theirs = _net(), _net()
    optimizer = ParallelMuon(mine.parameters(), lr=0.02, compute_dtype="bfloat16")
    biases = [p for p in theirs.parameters() if p.ndim == 1]
    muon = torch.optim.Muon([p for p in theirs.parameters() if p.ndim == 2], lr=0.02, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(biases, lr=0.02, weight_decay=0.1, fused=True)
    for step in range(5):
        if step in (2, 3):
            for each, net in ((optimizer, mine), (muon, theirs), (adamw, theirs)):
                _lose(how, each, net)
        set_gradients(mine.parameters(), step)
        set_gradients(theirs.parameters(), step)
        for each in (optimizer, muon, adamw):
            each.step()
    assert are_equal(mine.parameters(), theirs.parameters())


def _as_saved(net: nn.Module, optimizer: torch.optim.Optimizer, **options: bool) -> dict[str, Any]:
    return get_optimizer_state_dict(net, optimizer, options=StateDictOptions(**options))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [ParallelMuon, FlexDeMo])
@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
def test_torch_saves_and_loads_an_optimizer_without_a_step(kind: Any, options: dict[str, bool]) -> None:
    """``get_optimizer_state_dict`` has optimizers without state take a step; it must not be taken."""
    made: dict[str, Any] = {"lr": 0.02, "compute_dtype": "float32"} | ({"base": "adamw"} if kind is FlexDeMo else {})
    plain, asked, resumed = _net(), _net(), _net()
    optimizers = [kind(net, **made) for net in (plain, asked, resumed)]
    saved = copy.deepcopy(_as_saved(asked, optimizers[1], **options))
    assert all(not value.any() for state in optimizers[1].state.values() for value in state.values())
    for step in range(2):
        for net, optimizer in zip((plain, asked), optimizers, strict=False):
            set_gradients(net.parameters(), step)
            optimizer.step()
    for step in range(2):  # From the beginning once more, in an optimizer that has learnt something else.
        set_gradients(resumed.parameters(), 10 + step)
        optimizers[2].step()
    resumed.load_state_dict(_net().state_dict())
    set_optimizer_state_dict(resumed, optimizers[2], saved, options=StateDictOptions(**options))
    for step in range(2):
        set_gradients(resumed.parameters(), step)
        optimizers[2].step()
    fresh = _net()
    later = kind(fresh, **made)
    now = copy.deepcopy(_as_saved(asked, optimizers[1], **options))  # torch shares the tensors that it loads.
    set_optimizer_state_dict(fresh, later, now, options=StateDictOptions(**options))
    fresh.load_state_dict(asked.state_dict())
    for net, optimizer in ((plain, optimizers[0]), (asked, optimizers[1]), (resumed, optimizers[2]), (fresh, later)):
        set_gradients(net.parameters(), 2)
        optimizer.step()
    for other in (asked, resumed, fresh):
        assert are_equal(plain.parameters(), other.parameters())


def _bare() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6, bias=False), nn.Linear(6, 2, bias=False))


def _trained(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for step in range(2):
        set_gradients([p for group in optimizer.param_groups for p in group["params"]], step)
        optimizer.step()
    return optimizer


def test_matrices_go_on_with_the_first_moments_of_adamw() -> None:
    saved = _trained(torch.optim.AdamW(_bare().parameters(), lr=0.03, eps=1e-6)).state_dict()
    optimizer = ParallelMuon(_bare())
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


@pytest.mark.parametrize("kind", [ParallelMuon, FlexDeMo])
def test_what_is_gone_of_version_0_1_is_left_out(kind: Any) -> None:
    saved = _trained(kind(_bare().parameters())).state_dict()
    saved["param_groups"][0] |= {"ns_coefficients": "deepseek_v4", "ns_steps": 10, "eps": 1e-5}
    saved["param_groups"][0] |= {"hyperball": False, "muon_eq": "none", "muon_plus": "none"}
    for state in saved["state"].values():
        state["initial_norm"] = torch.ones(3)
    optimizer = kind(_bare().parameters(), ns_steps=4)
    gone = r"of version 0.1; .* of this program; ns_coefficients='deepseek_v4' went in .*; hyperball went in [^;]*; .*$"
    with pytest.warns(UserWarning, match=gone):
        optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert group.keys().isdisjoint({"hyperball", "muon_eq", "muon_plus"})
    assert (group["ns_coefficients"], group["ns_steps"], group["eps"]) == ((3.4445, -4.7750, 2.0315), 4, 1e-5)
    for number, state in optimizer.state_dict()["state"].items():
        assert state.keys() == saved["state"][number].keys() - {"initial_norm"}
        assert all(torch.equal(value, saved["state"][number][key]) for key, value in state.items())
