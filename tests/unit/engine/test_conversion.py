"""Conversion keeps what the user set: groups, order, numbers, schedulers; and says what becomes of an optimizer."""

import logging
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    ExponentialLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from lightning_muon import DiLoCo, FlexDeMo, FlexDeMoConfig, MuonConfig, ParallelMuon
from lightning_muon.engine.conversion import (
    OptimizerProxy,
    convert_optimizer,
    convert_optimizers,
    describe_optimizers,
    hand_back,
    optimizer_warnings,
    repoint_schedulers,
    tell,
)
from lightning_muon.flexdemo.config import MEASURED_FLEXDEMO_LR_FACTOR

_BASES: Any = ("sgd", "adamw", "muon")
_OVERRULED = r"(?s)AdamW of the program decides.*lr=0\.5 \(it says 0\.003\)"


@pytest.fixture
def model() -> nn.Sequential:
    return _model()


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4), nn.Linear(4, 7))


def _groups(optimizer: torch.optim.Optimizer, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(group.get(key) for key in keys) for group in optimizer.param_groups]


def _ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


@pytest.mark.parametrize("choice", [MuonConfig(momentum=0.9), *(FlexDeMoConfig(base=base) for base in _BASES)])
def test_groups_keep_their_numbers_order_and_keys(model: nn.Sequential, choice: Any) -> None:
    named = list(model.named_parameters())
    groups = [
        {"params": named[-4:], "lr": 1e-2, "name": "late", "initial_lr": 2e-2},
        {"params": named[:3], "weight_decay": 0.0, "mine": "kept", "muon_lr_factor": 5.0},
    ]
    old = torch.optim.AdamW(groups, lr=3e-4, weight_decay=0.02, betas=(0.7, 0.8), eps=1e-6)
    conversion = convert_optimizer(old, model, replace(choice, lr=9.0, weight_decay=9.0))
    new: Any = conversion.optimizer
    assert type(new) is (ParallelMuon if isinstance(choice, MuonConfig) else FlexDeMo) and _ids(new) == _ids(old)
    new.add_param_group({"params": named[3:5]})  # Has the defaults of the AdamW.
    assert _groups(new, "lr", "name", "initial_lr", "mine", "weight_decay", "betas", "adamw_eps") == [
        (1e-2, "late", 2e-2, None, 0.02, (0.7, 0.8), 1e-6),
        (3e-4, None, None, "kept", 0.0, (0.7, 0.8), 1e-6),
        (3e-4, None, None, None, 0.02, (0.7, 0.8), 1e-6),
    ]
    assert new.param_groups[0]["param_names"] == [name for name, _ in named[-4:]]
    assert not {"amsgrad", "fused", "foreach", "maximize", "decoupled_weight_decay"} & new.param_groups[0].keys()
    has_muon = getattr(choice, "base", "muon") == "muon"
    assert {each.name for each in new.routes if each.algorithm == "muon"} == (
        {"1.weight", "3.weight"} if has_muon else set()
    )
    factor = {ParallelMuon: 3.0, FlexDeMo: MEASURED_FLEXDEMO_LR_FACTOR}[type(new)] if has_muon else 1.0
    assert _groups(new, "muon_lr_factor") == [(factor,), (5.0,), (factor,)]
    assert (f"with {factor:g} times its learning rate" in conversion.summary) == has_muon
    if isinstance(choice, MuonConfig):
        assert _groups(new, "momentum", "eps", "adjust_lr_fn")[0] == (0.9, MuonConfig.eps, "match_rms_adamw")


@pytest.mark.parametrize(
    ("choice", "momentum", "factor"),
    [
        ("auto", 0.8, 1.0),
        (MuonConfig(muon_lr_factor=2.0), 0.8, 2.0),  # A config may say more of what torch.optim.Muon does not have.
        (FlexDeMoConfig(base="muon"), 0.0, 1.0),  # Nodes have one momentum, which travels.
        (FlexDeMoConfig(base="muon", replicator=DiLoCo(period=2)), 0.8, 1.0),
    ],
)
def test_torch_muon_keeps_all_of_its_numbers(model: nn.Sequential, choice: Any, momentum: float, factor: float) -> None:
    kept: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.3, "nesterov": False, "ns_steps": 3, "eps": 1e-5}
    kept["ns_coefficients"] = (3.0, -4.0, 2.0)
    new: Any = convert_optimizer(torch.optim.Muon([model[1].weight], momentum=0.8, **kept), model, choice).optimizer
    assert {route.algorithm for route in new.routes} == {"muon"}
    # None means original in torch.
    expected = (*kept.values(), momentum, "original", factor)
    assert _groups(new, *kept, "momentum", "adjust_lr_fn", "muon_lr_factor") == [expected]


@pytest.mark.parametrize(("kind", "choice"), [(ParallelMuon, "keep"), (FlexDeMo, FlexDeMoConfig())])
def test_our_optimizers_only_learn_their_routes(model: nn.Module, kind: Any, choice: Any) -> None:
    own = kind(model.parameters(), lr=1e-3)
    conversion = convert_optimizer(own, model, choice)
    assert conversion.optimizer is own and conversion.is_as_configured
    assert [route.name for route in own.routes] == [name for name, _ in model.named_parameters()]
    assert own.routes[0].algorithm == "adamw", "by type, not by shape"


class _OwnAdamW(torch.optim.AdamW):
    """May do anything in its step."""


_ADAMW, _ADAM = torch.optim.AdamW, torch.optim.Adam
_ONLY = "only these of torch become a ParallelMuon: AdamW, Adam, Muon"
_MOVES = "optimizer=MuonConfig() moves the matrices to Muon"
_SMALL = {"betas": (0.5, 0.999)}


@pytest.mark.parametrize(
    ("made", "choice", "kinds", "reasons"),
    [
        # What Muon cannot stand in for is kept.
        ([(torch.optim.SGD, {"lr": 0.1})], "auto", [torch.optim.SGD], [_ONLY]),
        ([(_ADAM, {"weight_decay": 0.1})], "auto", [_ADAM], ["weight_decay=0.1 is added to the gradient"]),
        ([(_ADAMW, {"amsgrad": True})], "auto", [_ADAMW], ["amsgrad=True"]),
        ([(_ADAMW, {"capturable": True})], "auto", [_ADAMW], ["capturable=True"]),
        ([(_OwnAdamW, {})], "auto", [_OwnAdamW], [_ONLY]),
        # So is AdamW where models train against each other.
        ([(_ADAMW, {})] * 2, "auto", [_ADAMW] * 2, ["the program has several optimizers", _MOVES]),
        ([(_ADAMW, _SMALL)], "auto", [_ADAMW], ["betas=(0.5, ", _MOVES]),
        ([(_ADAMW, {})] * 2, MuonConfig(), [ParallelMuon] * 2, None),
        ([(_ADAMW, _SMALL)], MuonConfig(), [ParallelMuon], None),
        # Adam is converted where it is AdamW.
        *(
            ([(_ADAM, {"lr": torch.tensor(1e-3), **options})], "auto", [ParallelMuon], None)
            for options in ({}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"fused": True})
        ),
    ],
)
def test_what_becomes_of_optimizers(
    model: nn.Sequential, made: list[Any], choice: Any, kinds: list[Any], reasons: list[str] | None
) -> None:
    parts = [part.parameters() for part in (model[1:3], model[3])]
    optimizers = [kind(part, **options) for (kind, options), part in zip(made, parts, strict=False)]
    conversions = convert_optimizers(optimizers, model, choice=choice)
    assert [type(each.optimizer) for each in conversions] == kinds
    warned = optimizer_warnings(conversions, choice)
    assert len(warned) == (len(made) if reasons else 0)
    for old, each, text in zip(optimizers, conversions, warned, strict=False):
        assert each.optimizer is old and "is kept and does not run on Muon" in text
        assert all(reason in text for reason in reasons or ()) and (reasons or [""])[0] in each.summary
    assert reasons or type(conversions[0].optimizer.param_groups[0]["lr"]) is float


def test_one_of_several_optimizers_may_have_no_matrix(model: nn.Sequential) -> None:
    optimizers = [torch.optim.Muon([model[1].weight]), _ADAMW(model[0].parameters())]
    conversions = convert_optimizers(optimizers, model, choice="auto")
    assert conversions[1].optimizer is optimizers[1] and "it has no matrices" in describe_optimizers(conversions)
    ours = [each.optimizer for each in convert_optimizers(optimizers, model, choice=FlexDeMoConfig())]
    assert [_groups(each, "algorithm") for each in ours] == [[("muon",)], [("adamw",)]]


_SCHEDULERS = {
    "one cycle": lambda o: OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=9),
    "nested": lambda o: SequentialLR(
        o, [ChainedScheduler([ConstantLR(o, 0.5, 3), ExponentialLR(o, 0.8)], optimizer=o), ExponentialLR(o, 0.9)], [4]
    ),
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
@pytest.mark.parametrize("has_proxy", [True, False])
def test_a_scheduler_acts_on_the_new_optimizer(kind: str, has_proxy: bool) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = _model()
        groups = [{"params": model[:3].parameters(), "lr": 0.01}, {"params": model[3:].parameters(), "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups)
        return model, optimizer, _SCHEDULERS[kind](optimizer)

    expected = _rates(*make())
    model, old, scheduler = make()
    new = convert_optimizer(old, model, "auto").optimizer
    if has_proxy:
        OptimizerProxy(old, new)
    else:
        repoint_schedulers([scheduler], old, new)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        assert _rates(model, new, scheduler) == expected
    assert old.state == {}


@pytest.mark.parametrize(
    ("kind", "config", "text"),
    [
        (torch.optim.AdamW, MuonConfig(lr=0.5, weight_decay=0.02), _OVERRULED),
        (torch.optim.AdamW, FlexDeMoConfig(base="adamw", lr=0.5), _OVERRULED),
        (ParallelMuon, MuonConfig(momentum=0.5), "has no effect: the program made a ParallelMuon"),
        (FlexDeMo, FlexDeMoConfig(decay=0.5), "has no effect: the program made a FlexDeMo"),
        (FlexDeMo, FlexDeMoConfig(), None),
    ],
)
def test_options_without_effect_are_named(model: nn.Module, kind: Any, config: Any, text: str | None) -> None:
    optimizer = kind(model.parameters(), lr=3e-3, weight_decay=config.weight_decay)
    conversions = convert_optimizers([optimizer], model, choice=config)
    found = optimizer_warnings(conversions, config)
    assert len(found) == (text is not None)
    assert all(re.search(text or "", each) and "weight_decay" not in each for each in found)
    assert text == _OVERRULED or optimizer_warnings(conversions, config, is_default=True) == []


def test_what_replaces_adamw_is_told_once_with_its_rate(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    text = describe_optimizers(convert_optimizers([torch.optim.AdamW(model.parameters())], model, choice="auto"))
    log = logging.Logger("nobody.listens")
    tell(log, text)
    (line,) = capsys.readouterr().err.splitlines()
    assert "AdamW -> ParallelMuon for matrices with 3 times its learning rate" in line and "level='INFO'" in line
    log.addHandler(logging.StreamHandler())
    tell(log, text)
    assert capsys.readouterr().err == f"{text}\n"


def test_a_training_that_follows_has_the_rate_of_the_program(model: nn.Module) -> None:
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    used = convert_optimizer(given, model, "auto").optimizer
    hand_back([], used, given, "auto")
    given.param_groups[0]["lr"] = 2e-3
    assert convert_optimizer(given, model, "auto").optimizer is used
    assert used.param_groups[0]["lr"] == 2e-3
