"""Steps in one process: what is not rounded, and streams of CUDA against a host that waits."""

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import ParallelMuon
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulz
from lightning_muon.optim import matrix_step
from lightning_muon.optim.graphs import NewtonSchulzGraphs
from lightning_muon.optim.matrix_step import HostExecutor, MatrixStep, make_executor
from lightning_muon.optim.moments import normalize_neurons_
from tests.support.step_plans import adamw_state, plan_for


def _step(parameters: list[nn.Parameter], overlap: str = "step") -> MatrixStep:
    group = dict(ParallelMuon(parameters).param_groups[0])
    arithmetic = Arithmetic(parameters[0].device.type, torch.float32)
    plan = plan_for(parameters, group=group, arithmetic=arithmetic, bucket_bytes=100, dedupe="auto", overlap=overlap)
    return MatrixStep(plan, {}, wire_dtype=torch.float32)


def _state(parameters: list[nn.Parameter]) -> dict[Tensor, dict[str, Tensor]]:
    return {p: {"momentum_buffer": torch.zeros_like(p)} if p.ndim > 1 else adamw_state(p) for p in parameters}


@torch.no_grad()
def test_weight_decay_is_not_rounded_to_bfloat16() -> None:
    # 1 - 0.02 * 0.1 is 0.998; as a bfloat16 it would be 0.9961, and the decay twice as strong.
    weight = nn.Parameter(torch.full((4, 4), 256.0, dtype=torch.bfloat16))
    optimizer = ParallelMuon([weight], lr=0.02, weight_decay=0.1)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert (weight == torch.tensor(256.0 * 0.998).bfloat16()).all()


def test_normuon_leaves_zeros_zero() -> None:
    moment = torch.zeros(3)
    assert not normalize_neurons_(torch.zeros(3, 4), moment, beta2=0.9).any() and not moment.any()


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
            step.run(dict(zip(parameters, gradients, strict=True)), states)
        results.append([parameter.detach() for parameter in parameters])
    assert all(map(torch.equal, *results))


def test_what_cannot_be_recorded_is_launched_kernel_by_kernel(caplog: pytest.LogCaptureFixture) -> None:
    cuda = {name: mock.MagicMock() for name in ("CUDAGraph", "device", "stream", "current_stream", "Stream")}
    refused = mock.MagicMock(side_effect=RuntimeError("operation not permitted"))
    way, graphs = NewtonSchulz(((3.4445, -4.7750, 2.0315),), torch.float32), []
    with mock.patch.multiple(torch.cuda, graph=refused, graph_pool_handle=mock.MagicMock(), **cuda):
        recorded = NewtonSchulzGraphs(torch.float32, torch.device("cpu"))
        graphs += [recorded.take((1, 8, 4), way, eps=1e-7) for _ in range(2)]
    assert graphs == [None, None]
    assert refused.call_count == 1
    assert "kernel by kernel" in caplog.text
    assert "not permitted" in caplog.text
