"""Plans for given tensors, without an optimizer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.config import MuonConfig
from lightning_muon.math.newton_schulz import Arithmetic
from lightning_muon.optim.parameters import zero_state
from lightning_muon.optim.step_plan import StepPlan, make_step_plan, require_equal_parameters
from lightning_muon.params.layout import Layout, RoutedParameter, group_by_mesh
from lightning_muon.params.routing import route_by_shape
from lightning_muon.schedule.exchange import PlanOptions


def adamw_state(tensor: Tensor) -> dict[str, Any]:
    """State of AdamW before the first step."""
    route = replace(route_by_shape("w", tuple(tensor.shape)), kind="elementwise")
    return zero_state(RoutedParameter(nn.Parameter(tensor), {}, route, Layout()))


def plan_for(
    tensors: Sequence[Tensor], mesh: DeviceMesh | None = None, *, group: Mapping[str, Any] | None = None, **options: Any
) -> StepPlan:
    """The plan for tensors that are called w0, w1, ..., and are routed by their shapes.

    Collective over the meshes of the tensors; every rank of them must call it.
    """
    layout, of_all = Layout(mesh), {**vars(MuonConfig()), **(group or {})}
    parameters = [
        RoutedParameter(tensor, of_all, route_by_shape(f"w{index}", tuple(tensor.shape)), layout)
        for index, tensor in enumerate(
            each if isinstance(each, nn.Parameter) else nn.Parameter(each) for each in tensors
        )
    ]
    meshes = group_by_mesh([parameter.tensor for parameter in parameters], layout)
    require_equal_parameters(parameters, meshes, "", frozenset())
    given = {"bucket_bytes": 10**6, "look_ahead": 2, "overlap": "step", "dedupe": "always"}
    machine = {"itemsize": 4, "arithmetic": Arithmetic("cpu", torch.float32)}
    made = PlanOptions(**{**machine, **given, **options})
    return make_step_plan(parameters, meshes, options=made)
