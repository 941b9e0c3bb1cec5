"""Routes of parameters in groups."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon import MuonConfig
from lightning_muon.optim.parameters import routes_of

OPTIONS = MuonConfig()


def _group(*parameters: nn.Parameter, algorithm: str = "auto", **options: Any) -> dict[str, Any]:
    return {"params": list(parameters), "algorithm": algorithm, **options}


def test_the_group_decides_then_the_module_then_the_shape() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    table, hidden = model[0].weight, model[1].weight
    assert routes_of([_group(table)], model, OPTIONS)[table].algorithm == "adamw"
    assert routes_of([_group(table)], None, OPTIONS)[table].algorithm == "muon"
    routes = routes_of([_group(table, algorithm="muon"), _group(hidden, algorithm="adamw")], model, OPTIONS)
    assert (routes[table].algorithm, routes[hidden].algorithm) == ("muon", "adamw")
    assert routes[table].reason == "embedding, algorithm='muon'"


def test_a_parameter_outside_the_module_is_routed_by_shape() -> None:
    model, extra = nn.Linear(4, 4), nn.Parameter(torch.ones(3, 2))
    routes = routes_of([_group(*model.parameters(), extra)], model, OPTIONS)
    assert (routes[extra].name, routes[extra].kind) == ("parameter 2", "matrix")


def test_a_vector_in_a_muon_group_is_refused_by_name() -> None:
    bias = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"fc\.bias \(3,\) is in a group with algorithm='muon'"):
        routes_of([_group(bias, algorithm="muon", param_names=["fc.bias"])], None, OPTIONS)
