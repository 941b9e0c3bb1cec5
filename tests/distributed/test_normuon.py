"""NorMuon: its state against full matrices in one process, through new plans, loads and steps that are not taken."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_muon import ParallelMuon
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.params.layout import local_tensor
from tests.distributed.sharding.training import distributed_over
from tests.reference.muon import ReferenceMuon
from tests.support.processes import ProcessPool
from tests.support.tensors import SHAPES as ALL_SHAPES
from tests.support.tensors import are_equal, random_tensors, whole, wholes

_OTHERS = ("square", "bias", "scalar")
SHAPES = {name: shape for name, shape in ALL_SHAPES.items() if name not in _OTHERS} | {"other_heads": (5, 12)}
# The last part of both heads is the same box, and has another number.
PARTS = {"fused": {"queries": (6, 4, 2)}, "fused_inputs": {"heads": 3, "other_heads": (4, 2, 2, 4)}}
NUM_STEPS, LR = 4, 0.02
NORMUON: dict[str, Any] = {"normuon": True}
CHOICES: list[dict[str, Any]] = [NORMUON, NORMUON | {"normuon_beta2": 0.8, "weight_decay": 0.0}]
FLOAT32 = {"compute_dtype": "float32", "wire_dtype": "float32", "bucket_bytes": 4000}
# Sums of squares are added up by pieces, in another order than by whole matrices.
TOLERANCE = 2e-6


def _train(place: Callable[[Tensor], Tensor], options: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and whole states after some steps; one gradient is missing in the first ones, one is NaN in the third.

    A new plan is made in the second step, and the state is loaded in the third one, so that owners change.
    """
    parameters = {name: nn.Parameter(place(tensor)) for name, tensor in random_tensors(SHAPES, 0).items()}
    optimizer = ParallelMuon(parameters.items(), lr=LR, algorithm="muon", **PARTS, **options)
    for step in range(NUM_STEPS):
        if step == 1:
            optimizer.add_param_group({"params": [("bias", nn.Parameter(torch.zeros(4)))], "algorithm": "adamw"})
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        for name, grad in random_tensors(SHAPES, 1 + step).items():
            parameters[name].grad = None if name == "odd" and step < 2 else place(grad)
        if step == 3:
            gradients = [parameter.grad for parameter in parameters.values()]
            before = _local_states(optimizer)
            parameters["stack"].grad = place(torch.full(SHAPES["stack"], math.nan))
            optimizer.step()
            assert are_equal(_local_states(optimizer), before), "a skipped step leaves all state"
            for parameter, gradient in zip(parameters.values(), gradients, strict=True):
                parameter.grad = gradient
        optimizer.step()
    names, states = [*SHAPES, "bias"], _states(optimizer)
    named = {f"{names[int(number)]}.{key}": states[f"{number}.{key}"] for number, key in (k.split(".") for k in states)}
    return wholes(parameters), named


def _states(optimizer: PlannedOptimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"].items()
    return wholes({f"{number}.{key}": value for number, state in states for key, value in state.items()})


def _local_states(optimizer: PlannedOptimizer) -> list[Tensor]:
    return [local_tensor(value).clone() for state in optimizer.state.values() for value in state.values()]


def _train_all(mesh_shape: tuple[int, ...]) -> list[tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]]:
    """Options, weights and states, with rows, columns or nothing of the matrices sharded.

    With replicas nothing but rows and columns.
    """
    cases = [(CHOICES[0], 0), (CHOICES[1], 1), (CHOICES[1], None)]
    if len(mesh_shape) > 1:
        cases = [(options, dim) for options in CHOICES for dim in (0, 1)]
    return [(options, *_train(distributed_over(mesh_shape, dim), FLOAT32 | options)) for options, dim in cases]


def _cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = {"queries": (0, (6, 4, 2)), "heads": (1, (4, 4, 4)), "other_heads": (1, (4, 2, 2, 4))}
    cut: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        dim, sizes = parts.get(name, (0, (tensor.shape[0],)))
        cut |= {f"{name} {number}": part for number, part in enumerate(tensor.split(sizes, dim))}
    return cut


def _reference(options: dict[str, Any]) -> ReferenceMuon:
    reference = ReferenceMuon(_cut(random_tensors(SHAPES, 0)), lr=LR, **options)
    for step in range(NUM_STEPS):
        reference.step(_cut({k: v for k, v in random_tensors(SHAPES, 1 + step).items() if k != "odd" or step >= 2}))
    return reference


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_shards_give_the_weights_of_full_matrices(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    references = {str(options): _reference(options) for options in CHOICES}
    for ran in gloo.run(_train_all, mesh_shape, world_size=math.prod(mesh_shape)):
        for options, weights, states in ran:
            reference = references[str(options)]
            for name, found in _cut(weights).items():
                torch.testing.assert_close(found, reference.matrices[name], rtol=TOLERANCE, atol=TOLERANCE)
            moments = {key.partition(".")[0]: each for key, each in states.items() if "second" in key}
            assert moments.keys() == SHAPES.keys()
            for name, found in moments.items():
                parts = [each for key, each in reference.second_moments.items() if key.startswith(f"{name} ")]
                expected = torch.stack(parts, 1) if "heads" in name else torch.cat(parts)
                torch.testing.assert_close(found.reshape(expected.shape), expected, rtol=TOLERANCE, atol=0)


def _train_among_others(add_at: int) -> list[Tensor]:
    """The weights of a Conv1D and a linear layer of one shape after four steps; others come and change meanwhile."""
    torch.manual_seed(0)
    layers = nn.ModuleDict({"inputs_first": Conv1D(8, 8), "outputs_first": nn.Linear(8, 8), "late": nn.Linear(6, 5)})
    weights = [layer.weight for layer in layers.values()]
    optimizer = ParallelMuon([{"params": [weight]} for weight in weights[:2]], lr=LR, normuon=True, **FLOAT32)
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
    alone = _train_among_others(add_at=4)
    for found, expected in zip(_train_among_others(add_at=1), alone, strict=True):
        assert torch.equal(found, expected)


def _turn_on(mesh_shape: tuple[int, ...]) -> list[Tensor]:
    """Momentum before and after NorMuon is turned on, and what is far from one process whose NorMuon begins then."""
    place = distributed_over(mesh_shape, 0)
    weights = [nn.Parameter(place(torch.eye(5, 7))) for _ in range(2)]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "normuon": True}]
    optimizer = ParallelMuon(groups, lr=LR, algorithm="muon", momentum=0.0, **FLOAT32)
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
