"""State: lost, saved and loaded, of other optimizers and of version 0.1."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from lightning_muon import FlexDeMo, ParallelMuon
from tests.support.tensors import are_equal, train


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 6, bias=False), nn.Linear(6, 3, bias=False))


@pytest.mark.parametrize("how", ["clear", "replace", "pop"])
def test_state_that_is_lost_begins_with_zeros(how: str) -> None:
    lost, fresh = _net(), _net()
    optimizer = train(ParallelMuon(lost.parameters(), lr=0.02), range(2))
    if how == "clear":
        optimizer.state.clear()
    elif how == "replace":
        optimizer.state = {}
    else:
        for parameter in lost.parameters():
            optimizer.state.pop(parameter)
    fresh.load_state_dict(lost.state_dict())
    train(optimizer, range(2, 4))
    train(ParallelMuon(fresh.parameters(), lr=0.02), range(2, 4))
    assert are_equal(lost.parameters(), fresh.parameters())


@pytest.mark.parametrize("kind", [ParallelMuon, FlexDeMo])
@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}], ids=str)
def test_torch_saves_and_loads_an_optimizer_without_a_step(kind: Any, options: dict[str, bool]) -> None:
    """``get_optimizer_state_dict`` has optimizers without state take a step; it must not be taken."""
    made: dict[str, Any] = {"lr": 0.02, "compute_dtype": "float32"} | ({"base": "adamw"} if kind is FlexDeMo else {})
    plain, asked, resumed = nets = [_net() for _ in range(3)]
    optimizers = [kind(net, **made) for net in nets]
    at_first = get_optimizer_state_dict(asked, optimizers[1], options=StateDictOptions(**options))
    at_first = copy.deepcopy(at_first)  # torch shares the tensors that it loads.
    assert all(not value.any() for state in optimizers[1].state.values() for value in state.values())
    train(optimizers[2], range(10, 12))  # It learns something else, and goes back to the beginning.
    resumed.load_state_dict(plain.state_dict())
    set_optimizer_state_dict(resumed, optimizers[2], at_first, options=StateDictOptions(**options))
    for optimizer in optimizers:
        train(optimizer, range(3))
    assert are_equal(plain.parameters(), asked.parameters())
    assert are_equal(plain.parameters(), resumed.parameters())


def test_a_state_of_torch_goes_on_with_its_bits() -> None:
    of_muon: Any = {"compute_dtype": "bfloat16", "adjust_lr_fn": "spectral_mup", "muon_lr_factor": 2.0}
    for kind, options, shapes, own in (
        (torch.optim.Muon, {"lr": 0.02, "momentum": 0.9}, [(13, 7), (7, 13)], of_muon),
        (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-2, "fused": True}, [(5, 3), (3,), (), (0, 4)], {}),
    ):
        mine, theirs = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
        reference = train(kind(theirs, **options), range(1))
        optimizer = ParallelMuon(mine, algorithm="adamw" if kind is torch.optim.AdamW else "muon", momentum=0.5, **own)
        optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        assert optimizer.param_groups[0]["muon_lr_factor"] == 1.0, "its rate was chosen for Muon"
        assert optimizer.param_groups[0]["momentum"] == options.get("momentum", 0.5), "what the state lacks stays"
        for one, other in zip(mine, theirs, strict=True):
            one.data.copy_(other)
        train(optimizer, range(1, 4))
        train(reference, range(1, 4))
        assert are_equal(mine, theirs)


def test_matrices_go_on_with_the_first_moments_of_adamw() -> None:
    """On the way back AdamW begins with zeros, and keeps nothing."""
    saved = train(torch.optim.AdamW(_net().parameters(), lr=0.03, eps=1e-6), range(2)).state_dict()
    optimizer = ParallelMuon(_net(), normuon=True)
    with pytest.warns(UserWarning, match=r"2 matrices \(0.weight, ...\) moved from AdamW to Muon: their first moments"):
        optimizer.load_state_dict(saved)
    found = optimizer.state_dict()
    assert all(torch.equal(found["state"][n]["momentum_buffer"], saved["state"][n]["exp_avg"]) for n in (0, 2))
    assert found["state"][0].keys() == {"momentum_buffer", "second_momentum_buffer"}
    assert all(torch.equal(found["state"][1][key], value) for key, value in saved["state"][1].items())
    (group,) = found["param_groups"]
    assert (group["lr"], group["adamw_eps"], group["eps"]) == (0.03, 1e-6, 1e-7)
    adamw = ParallelMuon(_net(), adamw_patterns=("0.weight",))
    with pytest.warns(UserWarning, match="moved from Muon to AdamW: their moments begin with zeros"):
        adamw.load_state_dict(found)
    assert adamw.state_dict()["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert not adamw.state_dict()["state"][0]["exp_avg"].any()


ADAMW = {"lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-8, "amsgrad": False}


@pytest.mark.parametrize(
    ("group", "state", "match"),
    [
        ({"ns_steps": 0}, {}, "ns_steps"),
        ({}, {0: {"momentum_buffer": torch.zeros(2)}}, r"its saved momentum_buffer \(2,\)"),
        ({}, {1: {"exp_avg": torch.zeros(2)}}, r"its saved exp_avg \(2,\)"),
        ({"lr": 0.1, "momentum": 0.9, "dampening": 0.0}, None, "not known, with .*'dampening'"),
        (ADAMW | {"amsgrad": True}, None, "saved with amsgrad=True"),
        (ADAMW | {"maximize": True}, None, "saved with maximize=True"),
    ],
)
def test_a_wrong_state_is_not_loaded(group: dict[str, Any], state: dict[int, Any] | None, match: str) -> None:
    optimizer = train(ParallelMuon(_net()), range(1))
    before, saved = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["step"] += 5
    if state is None:
        saved = {"state": {}, "param_groups": [group | {"params": range(len(before["state"]))}]}
    else:
        saved["param_groups"][0] |= group
        for number, wrong in state.items():
            saved["state"][number] |= wrong
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    for number, entries in before["state"].items():
        assert all(torch.equal(after["state"][number][key], value) for key, value in entries.items())
    assert after["param_groups"] == before["param_groups"]


@pytest.mark.parametrize("kind", [ParallelMuon, FlexDeMo])
def test_what_is_gone_of_version_0_1_is_left_out(kind: Any) -> None:
    saved = train(kind(_net().parameters()), range(2)).state_dict()
    saved["param_groups"][0] |= {"ns_coefficients": "deepseek_v4", "ns_steps": 10, "eps": 1e-5}
    saved["param_groups"][0] |= {"hyperball": False, "muon_eq": "none", "muon_plus": "none"}
    for state in saved["state"].values():
        state["initial_norm"] = torch.ones(3)
    optimizer = kind(_net().parameters(), ns_steps=4)
    gone = r"of version 0.1; .* of this program; ns_coefficients='deepseek_v4' went in .*; hyperball went in [^;]*; .*$"
    with pytest.warns(UserWarning, match=gone):
        optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert group.keys().isdisjoint({"hyperball", "muon_eq", "muon_plus"})
    assert (group["ns_coefficients"], group["ns_steps"], group["eps"]) == ((3.4445, -4.7750, 2.0315), 4, 1e-5)
    for number, state in optimizer.state_dict()["state"].items():
        assert state.keys() == saved["state"][number].keys() - {"initial_norm"}
        assert all(torch.equal(value, saved["state"][number][key]) for key, value in state.items())
