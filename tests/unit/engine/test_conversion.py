"""Conversion keeps what the user set: groups, order, numbers, schedulers; and says what becomes of an optimizer."""

from __future__ import annotations

import gc
import warnings
import weakref
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
from lightning_muon.engine.conversion import (
    OptimizerProxy,
    ReplacedParameters,
    check_choice,
    config_of,
    convert_optimizers,
    convert_to_flexdemo,
    convert_to_muon,
    describe_optimizers,
    has_matrices,
    optimizer_warnings,
    repoint_schedulers,
)
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.flexdemo.replicators import DiLoCo


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4), nn.Linear(4, 7))


def _algorithms(optimizer: ParallelMuon) -> dict[str, str]:
    return {route.name: route.algorithm for route in optimizer.routes}


def test_adamw_gives_its_matrices_to_muon_and_keeps_its_numbers() -> None:
    model = _model()
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.02, betas=(0.7, 0.8), eps=1e-6)
    adopted = convert_to_muon(adamw, model, MuonConfig(momentum=0.9)).optimizer
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
    new = convert_to_muon(old, model, MuonConfig()).optimizer
    assert [[id(p) for p in group["params"]] for group in new.param_groups] == [
        [id(p) for p in group["params"]] for group in old.param_groups
    ]
    keys = ("lr", "name", "initial_lr", "mine", "weight_decay")
    assert [tuple(group.get(key) for key in keys) for group in new.param_groups] == [
        (1e-2, "late", 2e-2, None, 1e-2), (1e-3, None, None, "kept", 0.0),
    ]  # fmt: skip


def test_a_group_that_comes_later_has_the_defaults_of_the_adamw() -> None:
    model = _model()
    old = torch.optim.AdamW(model[1].parameters(), lr=1e-3, weight_decay=0.3, betas=(0.5, 0.6))
    new = convert_to_muon(old, model, MuonConfig()).optimizer
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
    new = convert_to_muon(old, model, MuonConfig(adamw_patterns=())).optimizer
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
    conversion = convert_to_muon(optimizer, model, MuonConfig())
    assert conversion.optimizer is optimizer
    assert conversion.is_as_configured
    assert _algorithms(optimizer)["0.weight"] == "adamw", "by type, not by shape"
    assert not optimizer._existing_state, "how the state is divided is decided later"


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
    conversion = convert_to_muon(optimizer, model, MuonConfig())
    assert conversion.optimizer is optimizer
    assert reason in conversion.kept_because


class _OwnAdamW(torch.optim.AdamW):
    """May do anything in its step."""


@pytest.mark.parametrize(
    "kwargs", [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, {"fused": True}, {"foreach": False}]
)
def test_adam_is_converted_where_it_computes_the_same_as_adamw(kwargs: dict[str, Any]) -> None:
    model = _model()
    adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3), **kwargs)
    conversion = convert_to_muon(adam, model, MuonConfig())
    assert isinstance(conversion.optimizer, ParallelMuon)
    assert conversion.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert isinstance(conversion.optimizer.param_groups[0]["lr"], float)


def test_an_optimizer_that_took_steps_is_an_error() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.named_parameters())
    new = convert_to_muon(optimizer, model, MuonConfig()).optimizer
    assert new.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    model(torch.arange(3)).sum().backward()
    optimizer.step()
    for convert, config in ((convert_to_muon, MuonConfig()), (convert_to_flexdemo, FlexDeMoConfig())):
        with pytest.raises(ValueError, match="AdamW has optimizer state already"):
            convert(optimizer, model, config)


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
def test_a_scheduler_acts_on_the_new_optimizer(kind: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = _model()
        groups = [{"params": model[:3].parameters(), "lr": 0.01}, {"params": model[3:].parameters(), "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups)
        return model, optimizer, _SCHEDULERS[kind](optimizer)

    expected = _rates(*make())
    model, old, scheduler = make()
    new = convert_to_muon(old, model, MuonConfig()).optimizer
    started = [group["lr"] for group in old.param_groups]
    repoint_schedulers([scheduler], old, new)
    assert [group["lr"] for group in new.param_groups] == started
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        assert _rates(model, new, scheduler) == expected
    assert old.state == {}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("base", ["sgd", "adamw", "muon"])
def test_flexdemo_keeps_groups_and_numbers_of_adamw(kind: Any, base: Any) -> None:
    model = _model()
    decay = 0.02 if kind is torch.optim.AdamW else 0.0
    groups = [{"params": model[3].parameters(), "lr": 1e-2, "name": "late"}, {"params": model[1].parameters()}]
    old = kind(groups, lr=3e-4, weight_decay=decay, betas=(0.7, 0.8), eps=1e-6)
    conversion = convert_to_flexdemo(old, model, FlexDeMoConfig(base=base, lr=9.0, weight_decay=9.0, decay=0.5))
    new = conversion.optimizer
    assert isinstance(new, FlexDeMo) and (new.config.base, new.config.decay) == (base, 0.5)
    assert [[id(p) for p in group["params"]] for group in new.param_groups] == [
        [id(p) for p in group["params"]] for group in old.param_groups
    ]
    keys = ("lr", "weight_decay", "betas", "adamw_eps", "name")
    assert [tuple(group.get(key) for key in keys) for group in new.param_groups] == [
        (1e-2, decay, (0.7, 0.8), 1e-6, "late"), (3e-4, decay, (0.7, 0.8), 1e-6, None),
    ]  # fmt: skip
    assert not {"amsgrad", "fused", "foreach", "maximize"} & new.param_groups[0].keys()
    assert ("base='adamw' keeps its moments" in conversion.caution) == (base == "sgd")
    assert has_matrices(new) == (base == "muon")


def test_flexdemo_takes_learning_rates_of_sgd_and_warns_of_signs() -> None:
    model = _model()
    old = torch.optim.SGD([{"params": model[1].parameters(), "lr": 0.5}, {"params": model[3].parameters()}], lr=0.1)
    conversion = convert_to_flexdemo(old, model, FlexDeMoConfig())
    assert [group["lr"] for group in conversion.optimizer.param_groups] == [0.5, 0.1]
    assert "Set sign=False" in conversion.caution
    assert convert_to_flexdemo(old, model, FlexDeMoConfig(sign=False)).caution == ""


@pytest.mark.parametrize(
    ("config", "momentum"), [({}, (0.0, False)), ({"replicator": DiLoCo(period=2)}, (0.8, True))], ids=str
)
def test_flexdemo_takes_momentum_of_muon_only_inside_of_nodes(
    config: dict[str, Any], momentum: tuple[float, bool]
) -> None:
    model = _model()
    old = torch.optim.Muon(
        [model[1].weight], lr=0.02, weight_decay=0.3, momentum=0.8, nesterov=True, eps=1e-5, ns_steps=4,
        ns_coefficients=(3.0, -4.0, 2.0), adjust_lr_fn="original",
    )  # fmt: skip
    conversion = convert_to_flexdemo(old, model, FlexDeMoConfig(base="muon", **config))
    group = conversion.optimizer.param_groups[0]
    keys = ("lr", "weight_decay", "eps", "ns_steps", "ns_coefficients", "adjust_lr_fn", "algorithm")
    expected = (0.02, 0.3, 1e-5, 4, (3.0, -4.0, 2.0), "original", "muon")
    assert tuple(group[key] for key in keys) == expected
    assert (group["momentum"], group["nesterov"]) == momentum and conversion.caution == ""


@pytest.mark.parametrize(
    ("make", "config", "match"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {}, "momentum=0.9 would be a second one"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), {}, "weight_decay=0.5 is added to the gradient"),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), {}, "maximize"),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"base": "adamw"}, r"set FlexDeMoConfig\(base='sgd'\)"),
        (lambda p: torch.optim.Muon(p), {}, r"need FlexDeMoConfig\(base='muon'\), got base='sgd'"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), {}, "no counterpart in FlexDeMo; use AdamW"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {}, "amsgrad=True is not supported by FlexDeMo"),
        (lambda p: torch.optim.Adagrad(p), {}, "the Adagrad .*only AdamW, Adam, SGD and torch.optim.Muon have a"),
        (lambda p: ParallelMuon(p), {}, "the ParallelMuon that configure_optimizers returned"),
    ],
)
def test_nothing_is_kept_that_would_let_nodes_drift_apart(make: Any, config: dict[str, Any], match: str) -> None:
    model = _model()
    with pytest.raises(ValueError, match=match):
        convert_to_flexdemo(make([model[1].weight]), model, FlexDeMoConfig(**config))


def test_a_flexdemo_is_taken_as_it_is_and_learns_its_routes() -> None:
    model = _model()
    own = FlexDeMo(model.parameters(), base="muon", lr=0.3)
    conversion = convert_to_flexdemo(own, model, FlexDeMoConfig())
    assert conversion.optimizer is own and conversion.is_as_configured
    assert [route.name for route in own.routes] == [name for name, _ in model.named_parameters()]


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.last = nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 5)


def _choose(module: nn.Module, *optimizers: Any, choice: Any = "auto") -> Any:
    return convert_optimizers(optimizers, [], module, choice=choice)


def test_the_report_says_what_was_done_and_why() -> None:
    module = _Module()
    conversions = _choose(module, torch.optim.AdamW(module.parameters()))
    report = describe_optimizers(conversions)
    assert "AdamW -> ParallelMuon for matrices" in report
    assert "first.weight" in report
    assert "embedding" in report
    assert optimizer_warnings(conversions, "auto") == []


@pytest.mark.parametrize("config", [MuonConfig, FlexDeMoConfig])
def test_options_that_the_optimizer_overrules_are_named(config: Any) -> None:
    base = {"base": "adamw"} if config is FlexDeMoConfig else {}
    choice = config(lr=0.5, weight_decay=0.02, betas=(0.5, 0.6), **base)
    module = _Module()
    conversions = _choose(module, torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.02), choice=choice)
    (warning,) = optimizer_warnings(conversions, choice)
    assert "AdamW of the program decides" in warning
    assert "lr=0.5 (it says 0.003)" in warning and "betas=(0.5, 0.6) (it says (0.9, 0.999))" in warning
    assert "weight_decay" not in warning
    same = _choose(module, torch.optim.AdamW(module.parameters()), choice=config(**base))
    assert optimizer_warnings(same, config(**base)) == []


def test_what_does_not_run_on_muon_is_told_unless_it_is_meant() -> None:
    module = _Module()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    conversions = _choose(module, sgd)
    assert conversions[0].optimizer is sgd
    assert "SGD is kept and does not run on Muon" in optimizer_warnings(conversions, "auto")[0]
    adamw = torch.optim.AdamW(module.parameters())
    conversions = _choose(module, adamw, choice="keep")
    assert conversions[0].optimizer is adamw and optimizer_warnings(conversions, "keep") == []


def test_a_config_that_nothing_uses_is_named() -> None:
    module = _Module()
    config = MuonConfig(momentum=0.5)
    conversions = _choose(module, ParallelMuon(module.parameters()), choice=config)
    (warning,) = optimizer_warnings(conversions, config)
    assert "has no effect" in warning


def test_nothing_for_muon_is_an_error_that_says_how_to_go_on() -> None:
    module = _Module()
    with pytest.raises(ValueError, match=r"(?s)embedding.weight.*optimizer='keep'"):
        _choose(module, torch.optim.AdamW(module.embedding.parameters()))


def test_one_of_several_optimizers_may_have_no_matrix() -> None:
    module = _Module()
    adamw = torch.optim.AdamW(module.embedding.parameters())
    muon = torch.optim.Muon([module.first.weight])
    conversions = _choose(module, muon, adamw)
    assert [type(conversion.optimizer) for conversion in conversions] == [ParallelMuon, torch.optim.AdamW]
    assert "it has no matrices" in describe_optimizers(conversions)


def test_a_placeholder_is_left_alone() -> None:
    module = _Module()
    placeholder = torch.optim.SGD(module.parameters(), lr=0.1)
    conversions = convert_optimizers(
        [placeholder], [], module, choice="auto", is_placeholder=lambda o: o is placeholder
    )
    (conversion,) = conversions
    assert conversion.optimizer is placeholder and conversion.summary == "none"
    assert optimizer_warnings([conversion], "auto") == []


def test_a_choice_is_a_word_or_a_config() -> None:
    assert isinstance(config_of("auto"), MuonConfig) and config_of(FlexDeMoConfig(lr=0.5)).lr == 0.5
    with pytest.raises(ValueError, match="a MuonConfig or a FlexDeMoConfig, got 3"):
        check_choice(3)


def _replace(module: nn.Module) -> None:
    """What sharding does to parameters."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            setattr(child, name, nn.Parameter(parameter.detach().clone()))


def test_an_optimizer_made_too_early_follows_its_parameters() -> None:
    module = _Module()
    optimizer = torch.optim.AdamW([{"params": module.last.parameters()}, {"params": [module.embedding.weight]}])
    replaced = ReplacedParameters(module)
    _replace(module)
    replaced.close(module)
    replaced.rebind(optimizer, module)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in module.last.parameters()]
    assert optimizer.param_groups[1]["params"][0] is module.embedding.weight


def test_state_of_a_replaced_parameter_is_an_error() -> None:
    module = _Module()
    optimizer = torch.optim.AdamW(module.parameters())
    module.last(torch.ones(6)).sum().backward()
    optimizer.step()
    replaced = ReplacedParameters(module)
    _replace(module)
    replaced.close(module)
    with pytest.raises(ValueError, match=r"has state for last\.weight"):
        replaced.rebind(optimizer, module)


def test_replaced_parameters_are_not_kept_alive() -> None:
    module = _Module()
    old = weakref.ref(module.first.weight)
    replaced = ReplacedParameters(module)
    _replace(module)
    replaced.close(module)
    gc.collect()
    assert old() is None


def test_parameters_that_stay_can_be_moved_afterwards() -> None:
    module = _Module()
    replaced = ReplacedParameters(module)
    replaced.close(module)
    assert weakref.getweakrefcount(module.first.weight) == 0


def test_every_optimizer_becomes_a_flexdemo_with_its_scheduler() -> None:
    module = _Module()
    muon = torch.optim.Muon([module.first.weight])
    adamw = torch.optim.AdamW(module.embedding.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(adamw)
    choice = FlexDeMoConfig(base="muon")
    conversions = convert_optimizers([muon, adamw], [scheduler], module, choice=choice)
    assert [type(conversion.optimizer) for conversion in conversions] == [FlexDeMo, FlexDeMo]
    assert scheduler.optimizer is conversions[1].optimizer
    # An optimizer without matrices beside one that has some is no mistake.
    assert [group["algorithm"] for a in conversions for group in a.optimizer.param_groups] == ["muon", "adamw"]
    assert "FlexDeMo(base='muon')" in describe_optimizers(conversions)


def test_a_flexdemo_where_nothing_is_left_to_exchange_is_an_error() -> None:
    module = _Module()
    for choice in ("auto", "keep", MuonConfig()):
        with pytest.raises(ValueError, match=r"or Trainer\(strategy='flexdemo'\)"):
            _choose(module, FlexDeMo(module.parameters()), choice=choice)


def test_muon_inside_of_flexdemo_needs_matrices() -> None:
    module = _Module()
    with pytest.raises(ValueError, match=r"(?s)embedding.weight.*FlexDeMoConfig\(base='adamw'\)"):
        _choose(module, torch.optim.AdamW(module.embedding.parameters()), choice=FlexDeMoConfig(base="muon"))


def test_cautions_and_unused_configs_are_told() -> None:
    module = _Module()
    conversions = _choose(module, torch.optim.SGD(module.parameters(), lr=0.1), choice=FlexDeMoConfig())
    (warning,) = optimizer_warnings(conversions, FlexDeMoConfig())
    assert "steps by signs" in warning
    own = _choose(module, FlexDeMo(module.parameters()), choice=FlexDeMoConfig())
    assert optimizer_warnings(own, FlexDeMoConfig()) == []
    (warning,) = optimizer_warnings(own, FlexDeMoConfig(decay=0.5))
    assert "FlexDeMoConfig(...) has no effect" in warning and "made a FlexDeMo" in warning
    assert optimizer_warnings(own, FlexDeMoConfig(decay=0.5), is_default=True) == []


def _replaced() -> tuple[nn.Linear, torch.optim.AdamW, ParallelMuon, OptimizerProxy]:
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    given = torch.optim.AdamW(module.parameters(), lr=0.5)
    used = ParallelMuon([{"params": [module.weight]}, {"params": [module.bias], "algorithm": "adamw"}], lr=0.5)
    return module, given, used, OptimizerProxy(given, used)


def test_a_scheduler_of_the_given_optimizer_sets_rates() -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 3)
    given = torch.optim.AdamW(module.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given, gamma=0.5)
    used = ParallelMuon(module.parameters(), lr=0.5)
    proxy = OptimizerProxy(given, used)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rate in (0.5, 0.25, 0.125):
            assert [group["lr"] for group in used.param_groups] == [rate]
            proxy.follow()
            scheduler.step()


def test_rates_stay_shared_when_a_state_is_loaded() -> None:
    _, given, used, _ = _replaced()
    saved = used.state_dict()
    saved["param_groups"][0]["lr"] = 0.125
    used.load_state_dict(saved)
    assert given.param_groups[0]["lr"] == 0.125
    given.param_groups[0]["lr"] = 0.25
    assert used.param_groups[0]["lr"] == 0.25


def test_the_given_optimizer_follows_and_does_nothing_by_itself() -> None:
    module, given, used, proxy = _replaced()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    proxy.follow()
    assert all(map(torch.equal, before, module.parameters()))
    assert not given.state and given.param_groups is used.param_groups
    with pytest.raises(RuntimeError, match="AdamW does nothing any more: a ParallelMuon has taken its place"):
        given.step()
    given.zero_grad()
    assert module.weight.grad is None
