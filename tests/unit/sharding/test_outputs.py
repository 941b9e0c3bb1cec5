"""What a module returns: tensors in containers, and aliases in place of views."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon.sharding.outputs import tensors_in, without_views


@dataclass
class Output:
    hidden: Tensor


def _of_transformers(hidden: Tensor) -> Any:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden,))


Pair = namedtuple("Pair", "hidden number")
CONTAINERS: list[Callable[[Tensor], Any]] = [
    lambda hidden: hidden,
    lambda hidden: Pair(hidden, 1),
    lambda hidden: [(hidden, "text")],
    lambda hidden: OrderedDict(hidden=hidden, mask=None),
    _of_transformers,
    Output,
]


@pytest.mark.parametrize("contain", CONTAINERS)
def test_a_view_becomes_an_alias_in_any_container(contain: Callable[[Tensor], Any]) -> None:
    leaf = torch.arange(6.0, requires_grad=True)
    view = (leaf * leaf).view(2, 3)
    output = without_views(contain(view), ())
    assert type(output) is type(contain(view))
    alias, *others = tensors_in(output, set())
    assert all(other is alias for other in others)
    assert alias._base is None and alias.data_ptr() == view.data_ptr()
    alias *= leaf.view(2, 3)
    assert view._version == alias._version == 1
    alias.sum().backward()
    assert torch.equal(leaf.grad, 3 * leaf.detach().square())  # type: ignore[arg-type]


def test_what_is_no_view_or_needs_no_gradient_stays() -> None:
    hidden = torch.ones(6, requires_grad=True) * 2
    output = {"hidden": hidden, "mask": torch.ones(6).view(2, 3)}
    assert without_views(output, ()) is output
    with torch.no_grad():
        view = hidden.view(2, 3)
        assert without_views(view, ()) is view


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
