"""Routes of whole models."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_muon.config import OptimizerConfig
from lightning_muon.params.routing import Route, require_muon, route_module, routing_table


def _routes(module: nn.Module, **options: Any) -> dict[str, Route]:
    return route_module(module, OptimizerConfig(**options))


def _muon(module: nn.Module, **options: Any) -> set[str]:
    return {name for name, route in _routes(module, **options).items() if route.algorithm == "muon"}


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 2))


@pytest.mark.parametrize("head_first", [True, False])
def test_a_weight_tied_to_an_embedding_is_elementwise(head_first: bool) -> None:
    table, head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    table.weight = head.weight
    model = nn.Sequential(*((head, table) if head_first else (table, head)), nn.Linear(4, 4), nn.LayerNorm(4))
    route = route_module(model)["0.weight"]
    assert route.kind == "elementwise" and "tied to 1.weight" in route.reason
    assert _muon(model) == {"2.weight"}


def test_a_model_of_tables_and_head_has_nothing_for_muon() -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    routes = route_module(model)
    with pytest.raises(ValueError, match=r"None of the 5 parameters is routed to Muon") as error:
        require_muon(routes.values())
    for name, route in routes.items():
        assert f"{name}: {route.reason}" in str(error.value)
    require_muon(route_module(_mlp()).values())


def test_patterns_override_the_type_also_through_an_alias() -> None:
    assert _muon(_mlp(), adamw_patterns=["0.*"], muon_patterns=["3.weight"]) == {"2.weight", "3.weight"}
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    model[1].weight = model[0].weight
    assert _muon(model, muon_patterns=["1.weight"]) == {"0.weight"}


def test_fused_weights_are_divided_and_their_biases_are_not() -> None:
    routes = _routes(_mlp(), fused={"0.*": 3, "2.weight": (4, 2)})
    assert (routes["0.weight"].splits, routes["2.weight"].splits, routes["0.bias"].splits) == ((2, 2, 2), (4, 2), ())
    route = _routes(nn.Sequential(Conv1D(6, 4), nn.Linear(6, 2)), fused={"0.weight": 3})["0.weight"]
    assert (route.splits, route.split_dim, route.is_transposed) == ((2, 2, 2), 1, True), "along its outputs"


def test_factors_of_lora_are_matrices_but_those_of_embeddings() -> None:
    block = nn.ModuleDict({"lora_A": nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})})
    block["lora_embedding_A"] = nn.ParameterDict({"default": nn.Parameter(torch.zeros(2, 9))})
    assert _muon(nn.Sequential(block, nn.Linear(4, 2))) == {"0.lora_A.default.weight"}


def test_weights_with_fused_names_ask_for_fused() -> None:
    block = nn.ModuleDict({name: nn.Linear(4, 12) for name in ("qkv", "Wqkv", "in_proj", "c_attn", "kv_proj", "up")})
    model = nn.ModuleList((block, nn.MultiheadAttention(4, 2), nn.ModuleDict({"gate_up_proj": nn.Linear(4, 4)})))
    asked = {name for name, route in _routes(model, muon_patterns=("2.*.weight",)).items() if "?" in route.reason}
    assert asked == {
        "0.qkv.weight", "0.Wqkv.weight", "0.in_proj.weight", "0.c_attn.weight", "0.kv_proj.weight",
        "1.in_proj_weight", "2.gate_up_proj.weight",
    }  # fmt: skip
    assert "Linear weight; fused? see fused=" in _table(model)
    fused = _routes(model, fused={"0.*.weight": 3, "1.in_proj_weight": 3, "2.*.weight": 1})
    assert not any("?" in route.reason for route in fused.values()), "declared, also as one matrix"


def _table(module: nn.Module) -> str:
    routes = route_module(module).values()
    shapes = [(tuple(p.shape), not p.requires_grad) for p in module.parameters()]
    return routing_table([(route, shape, frozen) for route, (shape, frozen) in zip(routes, shapes, strict=True)])
