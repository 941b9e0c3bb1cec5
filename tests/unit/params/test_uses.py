"""Places of parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_muon.params.uses import inside_repeated_block, parameter_uses, walk


def test_order_and_names_are_those_of_named_parameters() -> None:
    model = nn.Transformer(8, 2, 2, 2, 16)
    assert [uses[0].name for uses in parameter_uses(model)] == [name for name, _ in model.named_parameters()]


def test_every_place_of_a_tied_weight_and_of_a_shared_module_is_listed() -> None:
    model = nn.Module()
    model.table = nn.Embedding(5, 3)
    model.alias = model.table
    model.head = nn.Linear(3, 5, bias=False)
    model.head.weight = model.table.weight
    assert [[use.name for use in uses] for uses in parameter_uses(model)] == [
        ["table.weight", "alias.weight", "head.weight"]
    ]


def test_wrapper_parts_are_stripped_from_names() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(2, 2)))
    assert [uses[0].name for uses in parameter_uses(model)] == ["0.weight", "0.bias"]


def test_a_module_that_contains_itself_is_walked_once() -> None:
    model = nn.Module()
    model.layer = nn.Linear(2, 2)
    model.layer.parent = model
    assert [name for *_, (name, _) in walk(model)] == ["", "layer"]


def test_a_lazy_layer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"0\.weight of lazy module LazyLinear has no shape yet"):
        parameter_uses(nn.Sequential(nn.LazyLinear(3)))


def test_layers_of_an_mlp_are_no_repeated_block_but_composites_are() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    model = nn.ModuleDict(
        {
            "mlp": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            "stages": nn.Sequential(block(), block()),
            "one_stage": nn.Sequential(block(), nn.Linear(2, 2)),
            "layers": nn.ModuleList([block()]),
        }
    )
    inside = {path[-1][0] for path in walk(model) if isinstance(path[-1][1], nn.Linear) and inside_repeated_block(path)}
    assert inside == {"stages.0.0", "stages.1.0", "layers.0.0"}
