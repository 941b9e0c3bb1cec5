"""A backward in two parts has the gradients of a whole one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from lightning_muon.pipeline.backward import backward_input, backward_weight

_WIDTH = 4


class _Net(nn.Module):
    """Weights that are used twice, in a sum, behind a parametrization, beside the input, frozen, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.normed = nn.Linear(_WIDTH, _WIDTH), weight_norm(nn.Linear(_WIDTH, _WIDTH))
        self.low, self.high, self.added = (nn.Parameter(torch.randn(_WIDTH, _WIDTH)) for _ in range(3))
        self.given, self.beside = (nn.Parameter(torch.randn(_WIDTH)) for _ in range(2))
        self.frozen, self.unused = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False), nn.Linear(2, 2)

    def forward(self, x: Tensor, carried: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.twice(x + self.added))
        hidden = torch.tanh(self.normed(hidden @ (self.low + self.high)))
        hidden.register_hook(lambda gradient: 2 * gradient)  # Runs once.
        first, second = self.twice(self.frozen(hidden)).split(_WIDTH // 2, -1)
        return torch.cat([first, second.sin()], -1), carried, self.beside.exp(), self.given, self.given * 2


class _Blocks(nn.Module):
    """Two blocks whose activations are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))) for _ in range(2))
        self.num_calls = 0

    def _call(self, block: nn.Module, hidden: Tensor) -> Tensor:
        self.num_calls += 1
        return torch.tanh(block(hidden))

    def forward(self, x: Tensor, carried: Tensor) -> tuple[Tensor, ...]:
        for block in self.blocks:
            x = checkpoint(self._call, block, x, use_reentrant=False)
        return x, carried


def _pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net = make()
    return net, copy.deepcopy(net)


def _leaves(values: list[Tensor]) -> list[Tensor]:
    return [value.clone().requires_grad_() for value in values]


@pytest.mark.parametrize("make", [_Net, _Blocks])
def test_two_parts_have_the_gradients_of_a_whole_backward(make: Callable[[], nn.Module]) -> None:
    whole, split = _pair(make)
    for _ in range(2):  # Gradients are added to those of the pass before.
        values = [torch.randn(_WIDTH, _WIDTH), torch.randn(3)]
        expected, leaves = _leaves(values), _leaves(values)
        outputs = whole(*expected)
        gradients = [torch.randn_like(output) for output in outputs]
        torch.autograd.backward(outputs, gradients)
        before = [None if p.grad is None else p.grad.clone() for p in split.parameters()]
        found, rest = backward_input(split(*leaves), gradients, leaves)
        for leaf, gradient in zip(expected, found, strict=True):
            torch.testing.assert_close(gradient, leaf.grad)
        for parameter, known in zip(split.parameters(), before, strict=True):
            assert (parameter.grad is None) if known is None else torch.equal(parameter.grad, known)  # type: ignore[arg-type]
        backward_weight(rest)
        for parameter, wanted in zip(split.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, wanted.grad)


def test_each_weight_has_a_gradient_of_its_own() -> None:
    _, net = _pair(_Net)
    leaf, carried = _leaves([torch.randn(_WIDTH, _WIDTH), torch.randn(3)])
    (output, *_) = net(leaf, carried)
    _, rest = backward_input([output], [torch.randn_like(output)], [leaf])
    backward_weight(rest)
    low, high = net.low.grad.clone(), net.high.grad  # type: ignore[union-attr]
    high.zero_()  # type: ignore[union-attr, operator]
    assert torch.equal(net.low.grad, low) and low.any()  # type: ignore[arg-type]


def test_outputs_count_once_and_unused_leaves_have_none() -> None:
    _, net = _pair(lambda: nn.Linear(_WIDTH, 1))
    leaf, unused = _leaves([torch.randn(1, _WIDTH), torch.randn(3)])
    found, rest = backward_input([net(leaf)], None, [leaf, unused])
    torch.testing.assert_close(found[0], net.weight.detach())
    assert found[1] is None
    backward_weight(rest)
    torch.testing.assert_close(net.weight.grad, leaf.detach())


def test_each_part_computes_checkpointed_activations_once() -> None:
    _, net = _pair(_Blocks)
    leaf, carried = _leaves([torch.randn(2, _WIDTH), torch.randn(3)])
    outputs = net(leaf, carried)
    assert net.num_calls == 2
    _, rest = backward_input(outputs, [torch.randn_like(output) for output in outputs], [leaf, carried])
    assert net.num_calls == 4
    backward_weight(rest)
    assert net.num_calls == 6
