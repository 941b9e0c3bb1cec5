"""Adoption keeps what the user set: groups, order, numbers, schedulers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from lightning_muon import MuonConfig, ParallelMuon
from lightning_muon.optim.adopt import AS_CONFIGURED, adopt, has_matrices, repoint_schedulers


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4), nn.Linear(4, 7))


def _algorithms(optimizer: ParallelMuon) -> dict[str, str]:
    return {route.name: route.algorithm for route in optimizer.routes}


def test_adamw_gives_its_matrices_to_muon_and_keeps_its_numbers() -> None:
    model = _model()
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.02, betas=(0.7, 0.8), eps=1e-6)
    adopted = adopt(adamw, model, MuonConfig(momentum=0.9)).optimizer
    assert isinstance(adopted, ParallelMuon)
    assert [name for name, kind in _algorithms(adopted).items() if kind == "muon"] == ["1.weight", "3.weight"]
    group = adopted.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"], group["adamw_eps"]) == (3e-4, 0.02, (0.7, 0.8), 1e-6)
    assert (group["momentum"], group["eps"]) == (0.9, MuonConfig.eps)
    assert group["adjust_lr_fn"] == "match_rms_adamw"
    assert not {"amsgrad", "fused", "foreach", "maximize", "decoupled_weight_decay"} & group.keys()


def test_groups_keep_their_number_order_and_extra_keys() -> None:
    model = _model()
    groups = [
        {"params": [model[3].weight, model[3].bias], "lr": 1e-2, "name": "late", "initial_lr": 2e-2},
        {"params": [model[1].weight, model[0].weight], "weight_decay": 0.0, "mine": "kept"},
    ]
    old = torch.optim.AdamW(groups, lr=1e-3)
    new = adopt(old, model, MuonConfig()).optimizer
    assert [[id(p) for p in group["params"]] for group in new.param_groups] == [
        [id(p) for p in group["params"]] for group in old.param_groups
    ]
    keys = ("lr", "name", "initial_lr", "mine", "weight_decay")
    assert [tuple(group.get(key) for key in keys) for group in new.param_groups] == [
        (1e-2, "late", 2e-2, None, 1e-2), (1e-3, None, None, "kept", 0.0),
    ]  # fmt: skip


def test_names_stay() -> None:
    model = _model()
    new = adopt(torch.optim.AdamW(model.named_parameters(), lr=1e-3), model, MuonConfig()).optimizer
    assert new.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


def test_a_group_that_comes_later_has_the_defaults_of_the_adamw() -> None:
    model = _model()
    old = torch.optim.AdamW(model[1].parameters(), lr=1e-3, weight_decay=0.3, betas=(0.5, 0.6))
    new = adopt(old, model, MuonConfig()).optimizer
    new.add_param_group({"params": list(model[3].parameters())})
    assert (new.param_groups[1]["weight_decay"], new.param_groups[1]["betas"]) == (0.3, (0.5, 0.6))


def test_torch_muon_keeps_all_of_its_numbers() -> None:
    model = _model()
    old = torch.optim.Muon(
        [model[1].weight, model[3].weight],
        lr=2e-3,
        weight_decay=0.3,
        momentum=0.8,
        nesterov=False,
        ns_steps=3,
        eps=1e-5,
    )
    new = adopt(old, model, MuonConfig(adamw_patterns=())).optimizer
    assert isinstance(new, ParallelMuon)
    assert set(_algorithms(new).values()) == {"muon"}
    group = new.param_groups[0]
    expected = {"lr": 2e-3, "weight_decay": 0.3, "momentum": 0.8, "nesterov": False, "ns_steps": 3, "eps": 1e-5}
    assert {key: group[key] for key in expected} == expected
    assert group["adjust_lr_fn"] == "original", "None means original in torch"
    assert new.defaults["momentum"] == 0.8


def test_a_parallel_muon_only_learns_what_its_parameters_are() -> None:
    model = _model()
    optimizer = ParallelMuon(model.parameters(), lr=1e-3)
    adoption = adopt(optimizer, model, MuonConfig())
    assert adoption.optimizer is optimizer
    assert adoption.summary == AS_CONFIGURED
    assert _algorithms(optimizer)["0.weight"] == "adamw", "by type, not by shape"
    assert not optimizer.state, "how the state is divided is decided later"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "only AdamW, Adam"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "weight_decay=0.1 is added to the gradient"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "maximize=True"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "capturable=True"),
        (lambda p: _OwnAdamW(p), "only AdamW, Adam"),
    ],
)
def test_what_muon_cannot_stand_in_for_is_kept_with_a_reason(make: Any, reason: str) -> None:
    model = _model()
    optimizer = make(model.parameters())
    adoption = adopt(optimizer, model, MuonConfig())
    assert adoption.optimizer is optimizer
    assert reason in adoption.kept_because


class _OwnAdamW(torch.optim.AdamW):
    """May do anything in its step."""


@pytest.mark.parametrize(
    "kwargs", [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"fused": True}, {"foreach": False}]
)
def test_adam_is_adopted_where_it_computes_the_same_as_adamw(kwargs: dict[str, Any]) -> None:
    model = _model()
    adoption = adopt(torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3), **kwargs), model, MuonConfig())
    assert isinstance(adoption.optimizer, ParallelMuon)
    assert adoption.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert isinstance(adoption.optimizer.param_groups[0]["lr"], float)


def test_an_optimizer_that_took_steps_is_an_error() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(3)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="state already"):
        adopt(optimizer, model, MuonConfig())


def test_has_matrices() -> None:
    model = _model()
    assert has_matrices(adopt(torch.optim.AdamW(model.parameters()), model, MuonConfig()).optimizer)  # type: ignore[arg-type]
    assert not has_matrices(adopt(torch.optim.AdamW(model[2].parameters()), model, MuonConfig()).optimizer)  # type: ignore[arg-type]


_SCHEDULERS = {
    "one cycle": lambda o: OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=9),
    "sequential": lambda o: SequentialLR(o, [ConstantLR(o, 0.5, 2), ExponentialLR(o, 0.9)], [2]),
    "chained": lambda o: ChainedScheduler([ConstantLR(o, 0.5, 2), ExponentialLR(o, 0.9)], optimizer=o),
    "nested": lambda o: SequentialLR(
        o, [ChainedScheduler([ConstantLR(o, 0.5, 3), ExponentialLR(o, 0.8)], optimizer=o), ExponentialLR(o, 0.9)], [4]
    ),
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
}


def _rates(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[Any]:
    seen: list[Any] = []
    for step in range(7):
        model(torch.arange(3)).square().sum().backward()
        optimizer.step()
        scheduler.step(float(step)) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
        seen.append([(g["lr"], g["betas"][0]) for g in optimizer.param_groups])
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("kind", _SCHEDULERS)
def test_a_scheduler_acts_on_the_new_optimizer_as_it_did_on_the_old(kind: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = _model()
        groups = [{"params": model[:3].parameters(), "lr": 0.01}, {"params": model[3:].parameters(), "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups)
        return model, optimizer, _SCHEDULERS[kind](optimizer)

    expected = _rates(*make())
    model, old, scheduler = make()
    new = adopt(old, model, MuonConfig()).optimizer
    started = [group["lr"] for group in old.param_groups]
    repoint_schedulers([scheduler], old, new)
    assert [group["lr"] for group in new.param_groups] == started
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        assert _rates(model, new, scheduler) == expected
    assert old.state == {}
