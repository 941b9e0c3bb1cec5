from unittest import mock

import pytest
import torch
from torch import nn

from lightning_muon import NonFiniteGradientError, ParallelMuon
from lightning_muon.engine import gradient_rules
from lightning_muon.engine.gradient_rules import GradientRules
from lightning_muon.sharding.mode import ModeOptions
from lightning_muon.sharding.modes import SingleProcess


class _Module(nn.Sequential):
    """Logs like a LightningModule."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
        self.logged: dict[str, float] = {}
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)

    def log(self, name: str, value: float) -> None:
        self.logged[name] = float(value)


def _rules(module: _Module, **options: object) -> GradientRules:
    module.automatic_optimization = True  # type: ignore[assignment]
    return GradientRules(
        module, SingleProcess(mock.Mock(), ModeOptions()), **({"clip_groups": "all", "max_skipped_steps": 1} | options)
    )  # type: ignore[arg-type]


def test_all_gradients_share_one_norm_which_is_logged() -> None:
    module = _Module()
    _rules(module).clip_by_norm(ParallelMuon(module), 1.5)
    assert module.logged["grad_norm"] == pytest.approx(15**0.5)
    assert all(torch.allclose(p.grad, torch.tensor(1.5 / 15**0.5)) for p in module.parameters())  # type: ignore[arg-type]


def test_the_gradients_of_matrices_are_left_out_if_asked_for() -> None:
    module = _Module()
    optimizer = ParallelMuon(module)
    _rules(module, clip_groups="elementwise").clip_by_norm(optimizer, 1.0)
    assert module.logged["grad_norm"] == pytest.approx(7**0.5), "three biases and the last layer, which is the head"
    for (name, parameter), route in zip(module.named_parameters(), optimizer.routes, strict=True):
        expected = 1.0 if route.algorithm == "muon" else 1 / 7**0.5
        assert torch.allclose(parameter.grad, torch.tensor(expected)), name  # type: ignore[arg-type]


def test_values_are_clamped() -> None:
    module = _Module()
    _rules(module).clip_by_value(torch.optim.SGD(module.parameters()), 0.25)
    assert all((parameter.grad == 0.25).all() for parameter in module.parameters())  # type: ignore[union-attr]


def test_an_optimizer_that_does_not_check_gets_no_gradients_when_one_is_nan() -> None:
    module = _Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rules = _rules(module)
    rules.before_step(optimizer)
    rules.log_skipped(optimizer)
    assert "skipped_steps" not in module.logged and module[0].weight.grad is not None
    module[1].bias.grad[0] = torch.inf  # type: ignore[index]
    rules.before_step(optimizer)
    rules.log_skipped(optimizer)
    assert module.logged["skipped_steps"] == 1
    assert all(parameter.grad is None for parameter in module.parameters())
    module[1].bias.grad = torch.full((2,), torch.nan)
    with pytest.raises(NonFiniteGradientError, match=r"1\.bias, after 1 skipped steps"):
        rules.before_step(optimizer)


def test_after_clipping_nobody_looks_again() -> None:
    module = _Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rules = _rules(module)
    with mock.patch.object(gradient_rules, "find_nonfinite", wraps=gradient_rules.find_nonfinite) as find:
        rules.clip_by_norm(optimizer, 1.0)
        rules.before_step(optimizer)
        rules.before_step(optimizer)
    known = [call.kwargs["known_norm"] for call in find.call_args_list]
    assert known[0] == pytest.approx(15**0.5) and known[1] is None, "a norm is good for one step"
