import torch
from torch import nn

from lightning_muon.grad_sync.transports import Results


def _parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3))
    parameter.sum().backward()
    return parameter


def test_a_gradient_is_a_result_from_when_it_was_kept_until_it_is_dropped() -> None:
    results, parameter = Results(), _parameter()
    assert not results.holds(parameter)
    results.keep(parameter)
    assert results.holds(parameter) and results.is_untouched(parameter)
    parameter.grad = None
    assert not results.holds(parameter) and not results.is_untouched(parameter)
    parameter.sum().backward()
    assert not results.holds(parameter), "a new gradient, whatever its value"


def test_a_result_to_which_backward_has_added_is_told_apart() -> None:
    results, parameter = Results(), _parameter()
    results.keep(parameter)
    parameter.sum().backward()
    assert results.holds(parameter) and not results.is_untouched(parameter)
    results.keep(parameter)
    assert results.is_untouched(parameter)
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)
    assert results.holds(parameter) and not results.is_untouched(parameter)
