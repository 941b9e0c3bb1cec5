"""Optimizers that are asked for their state before their parameters are replaced."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon import FlexDeMo, ParallelMuon
from lightning_muon.integrations.transformers.late_state import LateState, TrainerFlexDeMo, TrainerMuon
from tests.support.processes import ProcessPool


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 7), nn.Linear(7, 3))


def _made_early(kind: type[LateState], model: nn.Module) -> Any:
    """As a Trainer and ``Accelerator.prepare`` treat it before they shard the model."""
    optimizer: Any = kind([{"params": list(model.parameters())}])
    optimizer.route(model)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return optimizer


@pytest.mark.parametrize("kind", [TrainerMuon, TrainerFlexDeMo])
def test_there_is_no_state_before_the_first_step(kind: type[LateState]) -> None:
    assert _made_early(kind, _model()).state_dict()["state"] == {}


def test_parameters_that_are_replaced_are_not_kept_alive() -> None:
    model = _model()
    optimizer = _made_early(TrainerMuon, model)
    references = [weakref.ref(parameter) for parameter in model.parameters()]
    for layer in model:
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(parameter.detach().clone()))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    del layer, parameter
    gc.collect()
    assert all(reference() is None for reference in references)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert set(optimizer.state) == set(model.parameters())
    assert len(optimizer.state_dict()["state"]) == 5


@pytest.mark.parametrize(("kind", "plain"), [(TrainerMuon, ParallelMuon), (TrainerFlexDeMo, FlexDeMo)])
def test_steps_and_loaded_states_are_those_of_the_base_class(kind: type[LateState], plain: Any) -> None:
    models = [_model(), _model(), _model()]
    optimizers = [_made_early(kind, models[0]), plain(models[1]), _made_early(kind, models[2])]
    for step in range(4):
        if step == 2:
            models[2].load_state_dict(models[0].state_dict())
            optimizers[2].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        for model, optimizer in list(zip(models, optimizers, strict=True))[: 3 if step >= 2 else 2]:
            model(torch.tensor([step, 2 * step])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for early, late, resumed in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(early, late) and torch.equal(early, resumed)


def _step_without_nodes() -> None:
    model = _model()
    optimizer = _made_early(TrainerFlexDeMo, model)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


def test_flexdemo_without_nodes_is_an_error_that_says_how_to_start(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_step_without_nodes, match="lightning-muon launch --config_file", world_size=2)
