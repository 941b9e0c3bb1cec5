"""NorMuon: its state through new plans, loads and steps that are not taken."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import ParallelMuon
from lightning_muon.params.layout import local_tensor
from tests.distributed.sharding.training import distributed_over
from tests.support.processes import ProcessPool
from tests.support.tensors import SHAPES, are_equal, random_tensors

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
