"""What a module returns: changes that autograd cannot follow."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_muon.sharding.units import without_views


def _softmax(x: Tensor) -> Tensor:
    return without_views(x.softmax(0).view(2, 3), ())


def _with_its_base(x: Tensor) -> Tensor:
    base, view = without_views((x, x.view(2, 3)), ())
    base += 1
    return view


def _two_views(x: Tensor) -> Tensor:
    first, second = without_views((x.view(2, 3), x.view(3, 2)), ())
    second += 1
    return first


def _of_an_input(x: Tensor) -> Tensor:
    return without_views(x.view(2, 3), {"x": x})


@pytest.mark.parametrize("forward", [_softmax, _with_its_base, _two_views, _of_an_input])
def test_a_change_that_autograd_cannot_follow_raises(forward: Callable[[Tensor], Tensor]) -> None:
    output = forward(torch.ones(6, requires_grad=True) * 2)
    output += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
