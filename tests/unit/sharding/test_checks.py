"""Checks before sharding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_muon.sharding.units import check_meta, describe_model, dtype_units


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def test_equal_models_have_equal_descriptions() -> None:
    assert describe_model(_model(), []) == describe_model(_model(), [])


def _wider(model: nn.Sequential) -> None:
    model[2] = nn.Linear(4, 5)


def _halved(model: nn.Sequential) -> None:
    model[2].half()


def _frozen(model: nn.Sequential) -> None:
    model[0].bias.requires_grad_(False)


def _tied(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight


def _on_meta(model: nn.Sequential) -> None:
    model[2].to("meta")


def _other_buffer(model: nn.Sequential) -> None:
    model[1].register_buffer("extra", torch.zeros(1))


@pytest.mark.parametrize("change", [_wider, _halved, _frozen, _tied, _on_meta, _other_buffer])
def test_every_difference_that_matters_changes_the_description(change: object) -> None:
    model = _model()
    change(model)  # type: ignore[operator]
    assert describe_model(model, []) != describe_model(_model(), [])


def test_the_units_are_part_of_the_description() -> None:
    model = _model()
    assert describe_model(model, [model[0]]) != describe_model(model, [model[2]])


def test_a_module_half_on_meta_is_refused_and_a_model_half_on_meta_is_not() -> None:
    model = _model()
    model[2].to("meta")
    check_meta(model)
    model[0].weight = nn.Parameter(model[0].weight.to("meta"))
    with pytest.raises(ValueError, match="0: weight on the meta device, but bias not"):
        check_meta(model)


def test_layers_of_another_dtype_become_units_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).to(torch.bfloat16)
    model[1].float()
    assert dtype_units(model, []) == [model[1]]
    assert dtype_units(model, [model[0], model[1]]) == []


def test_frozen_layers_may_have_any_dtype() -> None:
    model = _model()
    model[0].to(torch.bfloat16).requires_grad_(False)
    assert dtype_units(model, []) == []


def test_two_dtypes_in_one_layer_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].bias = nn.Parameter(model[0].bias.to(torch.bfloat16))
    with pytest.raises(ValueError, match=r"0\.bias is bfloat16, but its FSDP2 unit Sequential is float32"):
        dtype_units(model, [])
