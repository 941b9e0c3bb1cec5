"""The choice of the optimizer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon import MuonConfig, ParallelMuon
from lightning_muon.engine.conversion import (
    ReplacedParameters,
    check_choice,
    config_of,
    convert_optimizers,
    describe_optimizers,
    optimizer_warnings,
)
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.optimizer import FlexDeMo


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


def test_an_unknown_optimizer_is_kept_with_one_warning() -> None:
    module = _Module()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    conversions = _choose(module, sgd)
    assert conversions[0].optimizer is sgd
    (warning,) = optimizer_warnings(conversions, "auto")
    assert "SGD is kept and does not run on Muon" in warning


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


def test_keep_keeps_without_a_warning() -> None:
    module = _Module()
    adamw = torch.optim.AdamW(module.parameters())
    conversions = _choose(module, adamw, choice="keep")
    assert conversions[0].optimizer is adamw
    assert optimizer_warnings(conversions, "keep") == []


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


def test_an_optimizer_that_was_made_too_early_follows_its_parameters() -> None:
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


def test_under_flexdemo_every_optimizer_becomes_one_and_schedulers_follow() -> None:
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


def test_a_flexdemo_without_matrices_for_muon_is_an_error_that_says_how_to_go_on() -> None:
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
