"""The pipeline of buckets in one process: what is called when, and what is left alone."""

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import ParallelMuon
from lightning_muon.math.newton_schulz import Arithmetic
from lightning_muon.optim import matrix_step
from lightning_muon.optim.executor import HostExecutor, make_executor
from lightning_muon.optim.matrix_step import AgreedGradients, MatrixStep
from lightning_muon.schedule.program import branch
from tests.support.step_plans import adamw_state, plan_for


def _step(parameters: list[nn.Parameter], overlap: str = "step") -> MatrixStep:
    group = dict(ParallelMuon(parameters).param_groups[0])
    arithmetic = Arithmetic(parameters[0].device.type, torch.float32)
    plan = plan_for(parameters, group=group, arithmetic=arithmetic, chunk_bytes=100, dedupe="auto", overlap=overlap)
    look_ahead = 0 if overlap == "off" else 2
    return MatrixStep(plan, look_ahead=look_ahead, wire_dtype=torch.float32)


def _state(parameters: list[nn.Parameter]) -> dict[Tensor, dict[str, Tensor]]:
    return {p: {"momentum_buffer": torch.zeros_like(p)} if p.ndim > 1 else adamw_state(p) for p in parameters}


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    """Three matrices, each a bucket, and a vector."""
    return [*(nn.Parameter(torch.ones(4, 4)) for _ in range(3)), nn.Parameter(torch.ones(4))]


def _agreed(parameters: Sequence[Tensor], check: Callable[[], None] | None = None) -> AgreedGradients:
    generator = torch.Generator().manual_seed(0)
    gradients = {p: torch.randn(p.shape, generator=generator) for p in parameters}
    return AgreedGradients(gradients=gradients, deferred_check=check)


@torch.no_grad()
@pytest.mark.parametrize("overlap", ["off", "step"])
@pytest.mark.parametrize("taking_part", [(0, 1, 2, 3), (1, 3), (0, 1), (3,), ()], ids=str)
@pytest.mark.parametrize("is_deferred", [False, True])
def test_what_runs_is_the_branch_of_the_program(
    parameters: list[nn.Parameter], overlap: str, taking_part: tuple[int, ...], is_deferred: bool
) -> None:
    step, ran = _step(parameters, overlap), list[str]()
    step.executor.recorder = mock.Mock(started=lambda op: ran.append(op.name))
    step.run(_agreed([parameters[i] for i in taking_part], (lambda: None) if is_deferred else None), _state(parameters))
    (expected,) = branch({0: list(step.plan.ops)}, step.facts).values()
    assert ran == [op.name for op in expected]
    assert sum("update" in name for name in ran) == len(set(taking_part) - {3})
    # A parameter without a gradient is left alone.
    assert [not torch.equal(p, torch.ones_like(p)) for p in parameters] == [i in taking_part for i in range(4)]
    assert ("check[]" in ran) is is_deferred
    assert sum("adamw" in name for name in ran) == 1


@torch.no_grad()
def test_weight_decay_is_not_rounded_to_bfloat16() -> None:
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
            step.run(AgreedGradients(gradients=dict(zip(parameters, gradients, strict=True))), states)
        results.append([parameter.detach() for parameter in parameters])
    assert all(map(torch.equal, *results))


def test_a_fingerprint_tells_newton_schulz_apart(parameters: list[nn.Parameter]) -> None:
    def fingerprint(dtype: torch.dtype = torch.float32, **options: object) -> str:
        group = dict(ParallelMuon(parameters).param_groups[0]) | options
        return plan_for(parameters, group=group, arithmetic=Arithmetic("cpu", dtype)).fingerprint

    assert fingerprint() == fingerprint() == fingerprint(ns_coefficients="jordan")
    others = [{"ns_steps": 4}, {"ns_coefficients": "polar_express"}, {"ns_quality": "fast"}, {"dtype": torch.bfloat16}]
    assert len({fingerprint(), *(fingerprint(**each) for each in others)}) == 5  # pyright: ignore[reportArgumentType]
    # Param groups may change after the plan was made.
    plan = plan_for(parameters, group=ParallelMuon(parameters).param_groups[0])
    for parameter in plan.parameters:
        parameter.group["ns_steps"] = 4
    assert plan.fingerprint == fingerprint(ns_steps=4)
