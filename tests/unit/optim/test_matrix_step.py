"""The pipeline of buckets in one process: what is called when, and what is left alone."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import ParallelMuon
from lightning_muon.comm.groups import PrivateGroups
from lightning_muon.optim import matrix_step
from lightning_muon.optim.executor import HostExecutor, make_executor
from lightning_muon.optim.matrix_step import MatrixStep
from lightning_muon.optim.meshes import group_by_mesh
from lightning_muon.optim.step_plan import BoundParameter, bind
from lightning_muon.params.exchange import PlanOptions
from lightning_muon.params.layout import TensorLayout
from lightning_muon.params.routing import route_by_shape


def _step(parameters: list[nn.Parameter], overlap: str = "step") -> MatrixStep:
    group = dict(ParallelMuon(parameters).param_groups[0])
    bound = [
        BoundParameter(p, group, route_by_shape(f"w{i}", tuple(p.shape)), TensorLayout())
        for i, p in enumerate(parameters)
    ]
    meshes = group_by_mesh(parameters, TensorLayout())
    options = PlanOptions(
        itemsize=4,
        device_type=parameters[0].device.type,
        chunk_bytes=100,
        assignment="lpt",
        dedupe="auto",
        look_ahead=2,
        overlap=overlap,  # type: ignore[arg-type]
    )
    groups = bind(bound, meshes, PrivateGroups(), options=options, settings="").exchange_groups
    return MatrixStep(
        groups,
        options=options,
        wire_dtype=torch.float32,
        compute_dtype=torch.float32,
        layout=TensorLayout(),
        device=parameters[0].device,
    )


def _state(parameters: list[nn.Parameter]) -> dict[Tensor, dict[str, Tensor]]:
    return {parameter: {"momentum_buffer": torch.zeros_like(parameter)} for parameter in parameters}


@torch.no_grad()
def test_the_elementwise_work_is_done_once_while_matrices_travel_or_if_there_are_none() -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    step, calls = _step(parameters), []
    states = _state(parameters)
    step.run({p: torch.randn(4, 4) for p in parameters}, states, adamw=lambda: calls.append("with matrices"))
    step.run({}, states, adamw=lambda: calls.append("without"))
    assert calls == ["with matrices", "without"]


@torch.no_grad()
def test_a_matrix_without_a_gradient_is_left_alone() -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    states = _state(parameters)
    _step(parameters).run({parameters[1]: torch.randn(4, 4)}, states, adamw=lambda: None)
    moved = [not torch.equal(p, torch.ones(4, 4)) for p in parameters]
    assert moved == [False, True, False]
    assert [bool(states[p]["momentum_buffer"].any()) for p in parameters] == moved


@torch.no_grad()
def test_nothing_changes_before_the_verdict() -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    states, calls = _state(parameters), []

    def verdict() -> None:
        unchanged = all(torch.equal(p, torch.ones(4, 4)) and not states[p]["momentum_buffer"].any() for p in parameters)
        calls.append(("verdict", unchanged))

    gradients = {p: torch.randn(4, 4) for p in parameters}
    _step(parameters).run(gradients, states, adamw=lambda: calls.append(("adamw", True)), verdict=verdict)
    assert calls == [("verdict", True), ("adamw", True)]

    others = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    expected = _state(others)
    _step(others).run(dict(zip(others, gradients.values(), strict=True)), expected, adamw=lambda: None)
    assert all(map(torch.equal, parameters, others))
    for one, other in zip(parameters, others, strict=True):
        assert torch.equal(states[one]["momentum_buffer"], expected[other]["momentum_buffer"])


@torch.no_grad()
def test_a_verdict_that_raises_gives_the_step_up_and_the_next_one_works() -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    states, step = _state(parameters), _step(parameters)
    gradients = {p: torch.randn(4, 4) for p in parameters}

    def refuse() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        step.run(gradients, states, adamw=lambda: pytest.fail("AdamW ran"), verdict=refuse)
    assert not any(states[p]["momentum_buffer"].any() for p in parameters)
    step.run(gradients, states, adamw=lambda: None)
    assert all(states[p]["momentum_buffer"].any() for p in parameters)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(8, 8), (20, 6), (3, 7)])
def test_matrices_of_equal_shape_give_the_same_bits_in_a_batch(shape: tuple[int, int]) -> None:
    together = [nn.Parameter(torch.ones(shape)) for _ in range(5)]
    gradients = [torch.randn(shape) for _ in together]
    _step(together).run(dict(zip(together, gradients, strict=True)), _state(together), adamw=lambda: None)
    for parameter, gradient in zip(together, gradients, strict=True):
        alone = nn.Parameter(torch.ones(shape))
        _step([alone]).run({alone: gradient}, _state([alone]), adamw=lambda: None)
        assert torch.equal(alone, parameter)


@torch.no_grad()
def test_weight_decay_of_bfloat16_weights_is_not_rounded_to_bfloat16() -> None:
    # 1 - 0.02 * 0.1 is 0.998; as a bfloat16 it would be 0.9961, and the decay twice as strong.
    weight = nn.Parameter(torch.full((4, 4), 256.0, dtype=torch.bfloat16))
    optimizer = ParallelMuon([weight], lr=0.02, weight_decay=0.1)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert (weight == torch.tensor(256.0 * 0.998).bfloat16()).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_streams_give_the_bits_of_a_host_that_waits() -> None:
    shapes = [(256, 256), (512, 128), (128, 512), (256, 256), (64, 64)]
    gradients = [torch.randn(shape, device="cuda") for shape in shapes]
    results: list[list[Tensor]] = []
    for make in (make_executor, lambda actions, _: HostExecutor(actions)):
        parameters = [nn.Parameter(torch.ones(shape, device="cuda")) for shape in shapes]
        states = _state(parameters)
        with mock.patch.object(matrix_step, "make_executor", make):
            step = _step(parameters)
        for _ in range(3):
            step.run(dict(zip(parameters, gradients, strict=True)), states, adamw=lambda: None)
        results.append([parameter.detach() for parameter in parameters])
    assert all(map(torch.equal, *results))
