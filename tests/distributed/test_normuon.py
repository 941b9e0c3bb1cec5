"""NorMuon: its state through new plans, loads and steps that are not taken, and where it is turned on."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_muon import ParallelMuon
from lightning_muon.params.layout import local_tensor
from tests.distributed.sharding.training import distributed_over
from tests.support.processes import ProcessPool
from tests.support.tensors import SHAPES, are_equal, random_tensors, whole

# The last part of both heads is the same box, and has another number.
PARTS: dict[str, Any] = {"fused": {"queries": (6, 4, 2)}, "fused_inputs": {"heads": 3, "other_heads": (4, 2, 2, 4)}}
OPTIONS: dict[str, Any] = {"lr": 0.02, "normuon": True, "compute_dtype": "float32", "wire_dtype": "float32"}
OF_NORMUON = {name: shape for name, shape in SHAPES.items() if len(shape) > 1} | {"other_heads": (5, 12)}


def _train(mesh_shape: tuple[int, ...], *, disturbed: bool) -> list[Tensor]:
    """This rank's weights after four steps.

    If disturbed, a new plan is made in the second one, the state is loaded in the third one, so that owners change, and
    a step with a NaN comes before the last one.
    """
    place = distributed_over(mesh_shape, 0)
    parameters = {name: nn.Parameter(place(tensor)) for name, tensor in random_tensors(OF_NORMUON, 0).items()}
    optimizer = ParallelMuon(parameters.items(), algorithm="muon", bucket_bytes=4000, **PARTS, **OPTIONS)
    for step in range(4):
        gradients = {name: place(grad) for name, grad in random_tensors(OF_NORMUON, 1 + step).items()}
        if disturbed and step == 1:
            optimizer.add_param_group({"params": [("bias", nn.Parameter(torch.zeros(4)))], "algorithm": "adamw"})
        if disturbed and step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        if disturbed and step == 3:
            parameters["stack"].grad = place(torch.full(OF_NORMUON["stack"], math.nan))
            optimizer.step()
            parameters["stack"].grad = gradients["stack"]
        optimizer.step()
    return [local_tensor(parameter.detach()) for parameter in parameters.values()]


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_plans_loads_and_skipped_steps_leave_no_trace(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    size = math.prod(mesh_shape)
    found, expected = (gloo.run(_train, mesh_shape, disturbed=each, world_size=size) for each in (True, False))
    assert all(map(are_equal, found, expected))


def _train_among_others(add_at: int) -> list[Tensor]:
    """The weights of a Conv1D and a linear layer of one shape after four steps; others come and change meanwhile."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({"inputs_first": Conv1D(8, 8), "outputs_first": nn.Linear(8, 8), "late": nn.Linear(6, 5)})
    weights = [layer.weight for layer in layers.values()]
    optimizer = ParallelMuon([{"params": [weight]} for weight in weights[:2]], **OPTIONS)
    optimizer.attach(layers)
    for step in range(4):
        if step == add_at:
            optimizer.add_param_group({"params": [weights[2]], "algorithm": "muon"})
        if step == add_at + 1:
            optimizer.param_groups[2]["algorithm"] = "adamw"
            optimizer.attach(layers)
        for number, weight in enumerate(weights):
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(10 * step + number))
        optimizer.step()
    return weights[:2]


def test_second_moments_stay_with_their_parameter() -> None:
    assert are_equal(_train_among_others(add_at=1), _train_among_others(add_at=4))


def _turn_on(mesh_shape: tuple[int, ...]) -> list[Tensor]:
    """Momentum before and after NorMuon is turned on, and what is far from one process whose NorMuon begins then."""
    place = distributed_over(mesh_shape, 0)
    weights = [nn.Parameter(place(torch.eye(5, 7))) for _ in range(2)]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "normuon": True}]
    optimizer = ParallelMuon(groups, algorithm="muon", momentum=0.0, **OPTIONS | {"normuon": False})
    found: list[Tensor] = []
    for step in range(2):
        optimizer.param_groups[0]["normuon"] = step == 1
        for number, weight in enumerate(weights):
            weight.grad = place(torch.ones(5, 7)) if step == 1 or number == 0 else None
        optimizer.step()
        found.append(whole(optimizer.state[weights[0]]["momentum_buffer"]))
        optimizer.param_groups[0]["momentum"] = 0.5
    states = optimizer.state_dict()["state"].values()
    return [*found, *(whole(state["second_momentum_buffer"]) for state in states)]


def test_an_option_that_is_turned_on_keeps_the_momentum(gloo: ProcessPool) -> None:
    for first, second, *moments in gloo.run(_turn_on, (2,), world_size=2):
        # Were it zeros now, it would be 0.5 after the step.
        assert torch.equal(first, torch.ones(5, 7)) and torch.equal(second, torch.ones(5, 7))
        assert moments[0].any() and torch.equal(*moments)  # Both groups have seen one gradient, the same.
