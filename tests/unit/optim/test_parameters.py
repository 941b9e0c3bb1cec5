"""What an optimizer knows of its parameters: routes and meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon import MuonConfig
from lightning_muon.optim.parameters import fail_on_all_meshes, group_by_mesh, routes_of
from lightning_muon.params.layout import Layout

OPTIONS = MuonConfig()


def _group(*parameters: nn.Parameter, algorithm: str = "auto", **options: Any) -> dict[str, Any]:
    return {"params": list(parameters), "algorithm": algorithm, **options}


def test_the_module_knows_an_embedding_and_the_shape_does_not() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    table = model[0].weight
    assert routes_of([_group(table)], model, OPTIONS)[table].algorithm == "adamw"
    assert routes_of([_group(table)], None, OPTIONS)[table].algorithm == "muon"


def test_a_parameter_outside_the_module_is_routed_by_shape() -> None:
    model, extra = nn.Linear(4, 4), nn.Parameter(torch.ones(3, 2))
    routes = routes_of([_group(*model.parameters(), extra)], model, OPTIONS)
    assert (routes[extra].name, routes[extra].kind) == ("parameter 2", "matrix")


def test_the_algorithm_of_a_group_wins() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    table, hidden = model[0].weight, model[1].weight
    routes = routes_of([_group(table, algorithm="muon"), _group(hidden, algorithm="adamw")], model, OPTIONS)
    assert (routes[table].algorithm, routes[hidden].algorithm) == ("muon", "adamw")
    assert routes[table].reason == "algorithm='muon'"


def test_a_vector_in_a_muon_group_is_refused_by_name() -> None:
    bias = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"fc\.bias \(3,\) is in a group with algorithm='muon'"):
        routes_of([_group(bias, algorithm="muon", param_names=["fc.bias"])], None, OPTIONS)


def test_local_tensors_are_alone_and_errors_are_just_raised() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    (members,) = group_by_mesh(tensors, Layout())
    assert members.axes.group is None
    assert all(one is other for one, other in zip(members.tensors, tensors, strict=True))
    fail_on_all_meshes(None, [members])
    with pytest.raises(ValueError, match="wrong"):
        fail_on_all_meshes(ValueError("wrong"), [members])
