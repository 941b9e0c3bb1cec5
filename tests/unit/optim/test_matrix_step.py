"""The pipeline of chunks in one process: what is called when, and what is left alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_muon import ParallelMuon
from lightning_muon.optim.binding import BoundParameter, bind
from lightning_muon.optim.matrix_step import MatrixStep
from lightning_muon.optim.meshes import group_by_mesh
from lightning_muon.params.routing import route_by_shape


def _step(parameters: list[nn.Parameter]) -> MatrixStep:
    group = dict(ParallelMuon(parameters).param_groups[0])
    bound = [BoundParameter(p, group, route_by_shape(f"w{i}", tuple(p.shape)), None) for i, p in enumerate(parameters)]
    meshes = group_by_mesh(parameters, None)
    groups = bind(bound, meshes, itemsize=4, chunk_bytes=100, settings="").exchange_groups
    return MatrixStep(groups, wire_dtype=torch.float32, compute_dtype=torch.float32, device=torch.device("cpu"))


def _state(parameters: list[nn.Parameter]) -> dict[Tensor, dict[str, Tensor]]:
    return {parameter: {"momentum_buffer": torch.zeros_like(parameter)} for parameter in parameters}


@torch.no_grad()
def test_the_elementwise_work_is_done_once_while_matrices_travel_or_if_there_are_none() -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    step, calls = _step(parameters), []
    states = _state(parameters)
    step.run({p: torch.randn(4, 4) for p in parameters}, states, meanwhile=lambda: calls.append("with matrices"))
    step.run({}, states, meanwhile=lambda: calls.append("without"))
    assert calls == ["with matrices", "without"]


@torch.no_grad()
def test_a_matrix_without_a_gradient_is_left_alone() -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    states = _state(parameters)
    _step(parameters).run({parameters[1]: torch.randn(4, 4)}, states, meanwhile=lambda: None)
    moved = [not torch.equal(p, torch.ones(4, 4)) for p in parameters]
    assert moved == [False, True, False]
    assert [bool(states[p]["momentum_buffer"].any()) for p in parameters] == moved


@torch.no_grad()
def test_weight_decay_of_bfloat16_weights_is_not_rounded_to_bfloat16() -> None:
    # 1 - 0.02 * 0.1 is 0.998; as a bfloat16 it would be 0.9961, and the decay twice as strong.
    weight = nn.Parameter(torch.full((4, 4), 256.0, dtype=torch.bfloat16))
    optimizer = ParallelMuon([weight], lr=0.02, weight_decay=0.1)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert (weight == torch.tensor(256.0 * 0.998).bfloat16()).all()
