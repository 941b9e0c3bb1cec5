"""Routes of whole models, and files that list parameters: those that come with the package."""

import math
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_muon.config import OptimizerConfig
from lightning_muon.params.routing import Route, keep_routes, require_muon, route_module, routing_table
from lightning_muon.params.shapes import read_shapes, shipped_shapes


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


def test_a_pattern_without_a_match_names_each_neighbour_once_in_a_stage() -> None:
    model = _mlp()
    keep_routes(model)
    del model[3]
    with pytest.raises(ValueError, match=r"nearest names are 0.weight, 3.weight, 2.weight$|are 3.weight, 2.weight, 0"):
        _routes(model, adamw_patterns=["*weigth"])


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


# Name -> number of matrices and of elements.
_PUBLISHED = {
    # Elements as the publishers count them, matrices by the layers of the configs.
    "10b": (40 * 4, 10_305_653_760),
    "llama3.2-1b": (16 * 7, 1_235_814_400),
    "llama3-8b": (32 * 7, 8_030_261_248),
    "llama3-70b": (80 * 7, 70_553_706_496),
    "t5-small": (12 * 6 + 6 * 4, 60_506_624),
    "t5-base": (2 * (12 * 6 + 12 * 2), 222_903_552),
    "deepseek-v3": (61 * 5 + 3 * 3 + 58 * (1 + 3 + 3 * 256), 671_026_404_352),
}


@pytest.mark.parametrize("name", shipped_shapes())
def test_shipped_files_have_the_sizes_of_the_published_models(name: str) -> None:
    model, (num_matrices, num_elements) = read_shapes(name), _PUBLISHED[name]
    stacks = {"stack": lambda shape: math.prod(shape[:-2]), "matrix": lambda shape: 1}
    counted = sum(stacks[p.kind](p.shape) for p in model.parameters if p.kind != "elementwise")
    assert counted == num_matrices
    assert sum(math.prod(p.shape) for p in model.parameters) == num_elements
    assert model.source.startswith("https://")


def test_shipped_t5_files_equal_the_routes_of_the_real_model() -> None:
    config = transformers.T5Config(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, vocab_size=32128)
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    routes = route_module(model)
    expected = [
        (route.name, tuple(parameter.shape), route.kind, route.reason)
        for route, parameter in zip(routes.values(), model.parameters(), strict=True)
    ]
    assert [(p.name, p.shape, p.kind, p.reason) for p in read_shapes("t5-small").parameters] == expected
