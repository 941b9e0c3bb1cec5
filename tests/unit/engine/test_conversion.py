"""Conversion keeps what the user set: groups, order, numbers, schedulers; and says what becomes of an optimizer."""

import logging
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

from lightning_muon import DiLoCo, FlexDeMo, FlexDeMoConfig, MuonConfig, ParallelMuon
from lightning_muon.engine.conversion import (
    OptimizerProxy,
    convert_optimizer,
    convert_optimizers,
    describe_optimizers,
    hand_back,
    optimizer_warnings,
    tell,
)
from lightning_muon.flexdemo.config import MEASURED_FLEXDEMO_LR_FACTOR


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


def test_adamw_gives_its_matrices_to_muon(model: nn.Module) -> None:
    adamw = torch.optim.AdamW(model.named_parameters(), lr=3e-4, weight_decay=0.02, betas=(0.7, 0.8), eps=1e-6)
    new = convert_optimizer(adamw, model, MuonConfig(momentum=0.9)).optimizer
    assert isinstance(new, ParallelMuon)
    assert [route.name for route in new.routes if route.algorithm == "muon"] == ["1.weight", "3.weight"]
    keys = ("lr", "weight_decay", "betas", "adamw_eps", "momentum", "eps", "adjust_lr_fn", "muon_lr_factor")
    assert _groups(new, *keys) == [(3e-4, 0.02, (0.7, 0.8), 1e-6, 0.9, MuonConfig.eps, "match_rms_adamw", 3.0)]
    assert not {"amsgrad", "fused", "foreach", "maximize", "decoupled_weight_decay"} & new.param_groups[0].keys()
    assert new.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]


def test_groups_keep_their_number_order_and_extra_keys(model: nn.Sequential) -> None:
    groups = [
        {"params": [model[3].weight, model[3].bias], "lr": 1e-2, "name": "late", "initial_lr": 2e-2},
        {"params": [model[1].weight, model[0].weight], "weight_decay": 0.0, "mine": "kept", "muon_lr_factor": 5.0},
    ]
    old = torch.optim.AdamW(groups, lr=1e-3, betas=(0.5, 0.6))
    new = convert_optimizer(old, model, MuonConfig(muon_lr_factor=2.0)).optimizer
    assert isinstance(new, ParallelMuon) and _ids(new) == _ids(old)
    new.add_param_group({"params": list(model[4].parameters())})  # Has the defaults of the AdamW.
    assert _groups(new, "lr", "name", "initial_lr", "mine", "weight_decay", "betas", "muon_lr_factor") == [
        (1e-2, "late", 2e-2, None, 1e-2, (0.5, 0.6), 2.0),
        (1e-3, None, None, "kept", 0.0, (0.5, 0.6), 5.0),
        (1e-3, None, None, None, 1e-2, (0.5, 0.6), 2.0),
    ]


def test_torch_muon_keeps_all_of_its_numbers(model: nn.Sequential) -> None:
    expected = {"lr": 2e-3, "weight_decay": 0.3, "momentum": 0.8, "nesterov": False, "ns_steps": 3, "eps": 1e-5}
    old = torch.optim.Muon([model[1].weight, model[3].weight], **expected)  # type: ignore[arg-type]
    new = convert_optimizer(old, model, "auto").optimizer
    assert isinstance(new, ParallelMuon) and {route.algorithm for route in new.routes} == {"muon"}
    # None means original in torch.
    assert _groups(new, *expected, "adjust_lr_fn") == [(*expected.values(), "original")]
    assert new.defaults["momentum"] == 0.8 and new.defaults["muon_lr_factor"] == 1.0
    # Of what torch.optim.Muon does not have, a config may say more.
    faster = convert_optimizer(old, model, MuonConfig(muon_lr_factor=2.0)).optimizer
    assert _groups(faster, "lr", "muon_lr_factor") == [(2e-3, 2.0)]


@pytest.mark.parametrize(
    ("betas", "reason"), [([(0.9, 0.99)] * 2, "the program has several optimizers"), ([(0.5, 0.999)], r"betas=(0.5, ")]
)
def test_adamw_is_kept_where_models_train_against_each_other(
    model: nn.Sequential, betas: list[tuple[float, float]], reason: str
) -> None:
    parts = (model[1:3], model[3])[: len(betas)]
    optimizers = [torch.optim.AdamW(part.parameters(), betas=b) for part, b in zip(parts, betas, strict=True)]
    kept = convert_optimizers(optimizers, model, choice="auto")
    assert [each.optimizer for each in kept] == optimizers
    for warning in optimizer_warnings(kept, "auto"):
        assert reason in warning and "optimizer=MuonConfig() moves the matrices to Muon" in warning
    converted = convert_optimizers(optimizers, model, choice=MuonConfig())
    assert [type(each.optimizer) for each in converted] == [ParallelMuon] * len(betas)


@pytest.mark.parametrize(("kind", "choice"), [(ParallelMuon, "keep"), (FlexDeMo, FlexDeMoConfig())])
def test_our_optimizers_only_learn_their_routes(model: nn.Module, kind: Any, choice: Any) -> None:
    own = kind(model.parameters(), lr=1e-3)
    conversion = convert_optimizer(own, model, choice)
    assert conversion.optimizer is own and conversion.is_as_configured
    assert [route.name for route in own.routes] == [name for name, _ in model.named_parameters()]
    assert own.routes[0].algorithm == "adamw", "by type, not by shape"


class _OwnAdamW(torch.optim.AdamW):
    """May do anything in its step."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "only these of torch become a ParallelMuon: AdamW, Adam, Muon"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "weight_decay=0.1 is added to the gradient"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "capturable=True"),
        (_OwnAdamW, "only these of torch become a ParallelMuon: AdamW, Adam, Muon"),
    ],
)
def test_what_muon_cannot_stand_in_for_is_kept(model: nn.Module, make: Any, reason: str) -> None:
    optimizer = make(model.parameters())
    conversions = convert_optimizers([optimizer], model, choice="auto")
    (warning,) = optimizer_warnings(conversions, "auto")
    assert conversions[0].optimizer is optimizer and reason in conversions[0].summary
    assert "is kept and does not run on Muon" in warning and reason in warning


@pytest.mark.parametrize("kwargs", [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"fused": True}])
def test_adam_is_converted_where_it_is_adamw(model: nn.Module, kwargs: dict[str, Any]) -> None:
    adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3), **kwargs)
    new = convert_optimizer(adam, model, "auto").optimizer
    assert isinstance(new, ParallelMuon)
    rate = new.param_groups[0]["lr"]
    assert isinstance(rate, float) and rate == pytest.approx(1e-3)


_SCHEDULERS = {
    "one cycle": lambda o: OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=9),
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
def test_a_scheduler_acts_on_the_new_optimizer(kind: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = _model()
        groups = [{"params": model[:3].parameters(), "lr": 0.01}, {"params": model[3:].parameters(), "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups)
        return model, optimizer, _SCHEDULERS[kind](optimizer)

    expected = _rates(*make())
    model, old, scheduler = make()
    new = convert_optimizer(old, model, "auto").optimizer
    OptimizerProxy(old, new)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        assert _rates(model, new, scheduler) == expected
    assert old.state == {}


@pytest.mark.parametrize("base", ["sgd", "adamw", "muon"])
def test_flexdemo_keeps_groups_and_numbers_of_adamw(model: nn.Sequential, base: Any) -> None:
    groups = [{"params": model[3].parameters(), "lr": 1e-2, "name": "late"}, {"params": model[1].parameters()}]
    old = torch.optim.AdamW(groups, lr=3e-4, weight_decay=0.02, betas=(0.7, 0.8), eps=1e-6)
    conversion = convert_optimizer(old, model, FlexDeMoConfig(base=base, lr=9.0, weight_decay=9.0, decay=0.5))
    new = conversion.optimizer
    assert isinstance(new, FlexDeMo) and (new.config.base, new.config.decay) == (base, 0.5)
    assert _ids(new) == _ids(old)
    assert _groups(new, "lr", "weight_decay", "betas", "adamw_eps", "name") == [
        (1e-2, 0.02, (0.7, 0.8), 1e-6, "late"), (3e-4, 0.02, (0.7, 0.8), 1e-6, None),
    ]  # fmt: skip
    assert not {"amsgrad", "fused", "foreach", "maximize"} & new.param_groups[0].keys()
    assert any(route.algorithm == "muon" for route in new.routes) == (base == "muon")
    factor = MEASURED_FLEXDEMO_LR_FACTOR if base == "muon" else 1.0
    assert _groups(new, "muon_lr_factor") == [(factor,), (factor,)]
    assert (f"with {factor:g} times its learning rate" in conversion.summary) == (base == "muon")


@pytest.mark.parametrize(
    ("config", "momentum"), [({}, (0.0, False)), ({"replicator": DiLoCo(period=2)}, (0.8, True))], ids=str
)
def test_flexdemo_has_momentum_of_muon_only_in_nodes(
    model: nn.Sequential, config: dict[str, Any], momentum: tuple[float, bool]
) -> None:
    kept = {"lr": 0.02, "weight_decay": 0.3, "eps": 1e-5, "ns_steps": 4, "ns_coefficients": (3.0, -4.0, 2.0),
            "adjust_lr_fn": "original"}  # fmt: skip
    old = torch.optim.Muon([model[1].weight], momentum=0.8, nesterov=True, **kept)  # type: ignore[arg-type]
    conversion = convert_optimizer(old, model, FlexDeMoConfig(base="muon", **config))
    expected = (*kept.values(), "muon", *momentum)
    assert _groups(conversion.optimizer, *kept, "algorithm", "momentum", "nesterov") == [expected]


@pytest.mark.parametrize("choice", [MuonConfig(lr=0.5, weight_decay=0.02), FlexDeMoConfig(base="adamw", lr=0.5)])
def test_options_that_the_optimizer_overrules_are_named(model: nn.Module, choice: Any) -> None:
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=choice.weight_decay)
    (warning,) = optimizer_warnings(convert_optimizers([adamw], model, choice=choice), choice)
    assert "AdamW of the program decides" in warning and "weight_decay" not in warning
    assert "lr=0.5 (it says 0.003)" in warning


@pytest.mark.parametrize(
    ("kind", "config", "warned"),
    [
        (ParallelMuon, MuonConfig(momentum=0.5), True),
        (FlexDeMo, FlexDeMoConfig(decay=0.5), True),
        (FlexDeMo, FlexDeMoConfig(), False),
    ],
)
def test_a_config_that_nothing_uses_is_named(model: nn.Module, kind: Any, config: Any, warned: bool) -> None:
    conversions = convert_optimizers([kind(model.parameters())], model, choice=config)
    found = optimizer_warnings(conversions, config)
    assert len(found) == warned
    assert all(f"has no effect: the program made a {kind.__name__}" in text for text in found)
    assert optimizer_warnings(conversions, config, is_default=True) == []


@pytest.mark.parametrize(
    ("choice", "kinds"), [("auto", [ParallelMuon, torch.optim.AdamW]), (FlexDeMoConfig(), [FlexDeMo] * 2)]
)
def test_one_of_several_optimizers_may_have_no_matrix(model: nn.Sequential, choice: Any, kinds: list[Any]) -> None:
    muon, adamw = torch.optim.Muon([model[1].weight]), torch.optim.AdamW(model[0].parameters())
    conversions = convert_optimizers([muon, adamw], model, choice=choice)
    assert [type(conversion.optimizer) for conversion in conversions] == kinds
    if choice == "auto":
        assert "it has no matrices" in describe_optimizers(conversions)
    else:
        assert [_groups(each.optimizer, "algorithm") for each in conversions] == [[("muon",)], [("adamw",)]]


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
    """And goes on with the state of the one before."""
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    used = convert_optimizer(given, model, "auto").optimizer
    used.param_groups[0]["lr"] = 5e-4  # As a scheduler of the first training has left it.
    hand_back([], used, given, "auto")
    assert given.param_groups[0]["lr"] == 5e-4
    given.param_groups[0]["lr"] = 2e-3
    again = convert_optimizer(given, model, "auto").optimizer
    assert again is used and again.param_groups[0]["lr"] == 2e-3
