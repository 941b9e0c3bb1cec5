"""Which modules become units, what is checked of a model, and changes of outputs that autograd cannot follow."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_muon.sharding.units import dtype_units, find_units, without_views


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)


class Stage(nn.Sequential):
    """Several blocks, as a stage of a convolutional network."""


def _names(model: nn.Module, policy: object = "auto") -> list[str]:
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(unit)] for unit in find_units(model, policy)]  # type: ignore[arg-type]


def _blocks(count: int, width: int = 8) -> list[nn.Module]:
    return [Block(width) for _ in range(count)]


def _stages(head: nn.Module | None = None) -> nn.ModuleDict:
    return nn.ModuleDict({"one": Stage(*_blocks(2)), "two": Stage(*_blocks(2)), "head": head or nn.Linear(8, 16)})


def _tie(model: Any, one: str, other: str) -> Any:
    model.get_submodule(other).weight = model.get_submodule(one).weight
    return model


def _used_again() -> nn.Module:
    block = Block()
    return nn.ModuleList([block, Block(), block])


def _gpt2() -> nn.Module:
    config = GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


# The model, the policy, and its units in any order.
_UNITS: list[tuple[Callable[[], nn.Module], object, str]] = [
    (
        lambda: nn.Transformer(8, 2, 2, 2, 16),
        "auto",
        "decoder.layers.0 decoder.layers.1 encoder.layers.0 encoder.layers.1",
    ),
    # Models of transformers are cut at the classes that they declare.
    (_gpt2, "auto", "transformer.h.0 transformer.h.1"),
    (lambda: nn.ModuleDict({"model": _gpt2()}), "auto", "model.transformer.h.0 model.transformer.h.1"),
    (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), "auto", ""),
    (_stages, "auto", "one.0 one.1 two.0 two.1"),
    # Small repeats are left to the root; of nested ones the outer one is taken.
    (
        lambda: nn.ModuleDict({"small": Stage(*_blocks(2, 2)), "large": Stage(*_blocks(2, 32))}),
        "auto",
        "large.0 large.1",
    ),
    (lambda: nn.Sequential(Stage(*_blocks(2)), Stage(*_blocks(2))), "auto", "0 1"),
    (lambda: nn.ModuleList([nn.ModuleList(_blocks(2)), nn.ModuleList(_blocks(2))]), "auto", "0.0 0.1 1.0 1.1"),
    (_used_again, "auto", "0 1"),
    (lambda: nn.Sequential(*(torch.compile(block, backend="eager") for block in _blocks(2))), "auto", "0 1"),
    # Units that share a weight with each other or with the rest are dropped, and those around them.
    (lambda: _tie(nn.Sequential(*_blocks(4)), "0.up", "2.up"), "auto", "1 3"),
    (lambda: _tie(_stages(), "one.0.up", "head"), [Block, Stage], "one.1 two two.0 two.1"),
    (lambda: _stages(Block()), [Block], "head one.0 one.1 two.0 two.1"),
    (lambda: _stages(Block()), {"Block"}, "head one.0 one.1 two.0 two.1"),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), [nn.Linear, nn.ReLU], "0"),
    (_stages, (), ""),
]


@pytest.mark.parametrize(("build", "policy", "expected"), _UNITS)
def test_modules_become_units(build: Callable[[], nn.Module], policy: object, expected: str) -> None:
    assert sorted(_names(build(), policy)) == expected.split()


def test_layers_of_another_dtype_become_units_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).to(torch.bfloat16)
    model[1].float()
    assert dtype_units(model, []) == [model[1]]
    assert dtype_units(model, [model[0], model[1]]) == []
    model[1].requires_grad_(False)  # Frozen layers may have any dtype.
    assert dtype_units(model, []) == []


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
