from unittest import mock

import pytest
import torch
from torch import nn

from lightning_muon import NonFiniteGradientError
from lightning_muon.engine import gradient_rules
from lightning_muon.engine.gradient_rules import GradientRules
from lightning_muon.engine.options import ClipGroups
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import SingleProcess


class _Module(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)


def _rules(module: _Module, optimizer: torch.optim.Optimizer, clip_groups: ClipGroups = "all") -> GradientRules:
    mode = SingleProcess(mock.Mock(), ModeOptions())
    return GradientRules(module, mode, [optimizer], clip_groups=clip_groups, max_skipped_steps=1)


def test_other_optimizers_get_no_gradients_when_one_is_nan() -> None:
    module = _Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rules = _rules(module, optimizer)
    rules.check_finite(optimizer)
    assert rules.skipped_steps(optimizer) == 0 and module[0].weight.grad is not None
    module[1].bias.grad[0] = torch.inf  # type: ignore[index]
    rules.check_finite(optimizer)
    assert rules.skipped_steps(optimizer) == 1
    assert all(parameter.grad is None for parameter in module.parameters())
    module[1].bias.grad = torch.full((2,), torch.nan)
    with pytest.raises(NonFiniteGradientError, match=r"1\.bias, after 1 skipped steps"):
        rules.check_finite(optimizer)


def test_after_clipping_nobody_looks_again() -> None:
    module = _Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rules = _rules(module, optimizer)
    with mock.patch.object(gradient_rules, "find_nonfinite", wraps=gradient_rules.find_nonfinite) as find:
        rules.clip_by_norm(list(module.parameters()), 1.0)
        rules.check_finite(optimizer)
        rules.check_finite(optimizer)
    known = [call.kwargs["known_norm"] for call in find.call_args_list]
    assert known[0] == pytest.approx(15**0.5) and known[1] is None, "a norm is good for one step"
