"""Which unit of a model waits for which parameter."""

from __future__ import annotations

from torch import nn

from lightning_muon.grad_sync.parameter_all_gather import units_of


def _model() -> nn.ModuleDict:
    """Three blocks, the first two of which share a weight, and an embedding tied to a head."""
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5, bias=False)) for _ in range(3)]
    blocks[1][0].weight = blocks[0][0].weight
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 5), "norm": nn.LayerNorm(5), "head": nn.Linear(5, 7)})
    model["head"].weight = model["embedding"].weight
    model["blocks"] = nn.ModuleList(blocks)
    return model


def test_a_parameter_belongs_to_the_innermost_units() -> None:
    model = _model()
    first, second, third = model["blocks"].children()
    inner = third.get_submodule("1")
    units = units_of(model, [first, second, third, inner, model["head"]])
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {unit: [names[parameter] for parameter in parameters] for unit, parameters in units.items()} == {
        model: ["embedding.weight", "norm.weight", "norm.bias", "blocks.0.0.weight"],
        model["head"]: ["embedding.weight", "head.bias"],
        first: ["blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.weight"],
        second: ["blocks.0.0.weight", "blocks.1.0.bias", "blocks.1.1.weight"],
        third: ["blocks.2.0.weight", "blocks.2.0.bias"],
        inner: ["blocks.2.1.weight"],
    }
    assert units_of(model, []) == {model: list(model.parameters())}
