"""Replicas: gradients in ``p.grad``, for every optimizer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.sharding.mode import ModeOptions
from lightning_muon.sharding.modes import make_mode
from tests.distributed.sharding.training import Run, loss, mesh_of, model
from tests.support.processes import ProcessPool


def _gradients(name: str, divisor: float | None) -> dict[str, Tensor | None]:
    net = model()
    mode = make_mode(name, mesh_of((dist.get_world_size(),)), ModeOptions(bucket_bytes=600))
    mode.prepare(net)
    mode.attach(net, [torch.optim.SGD(net.parameters(), lr=0.1)])
    mode.set_gradient_divisor(divisor)
    loss(net, Run(), 0, 0, dist.get_rank()).backward()
    mode.finish_gradients()
    mode.close()
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize(("name", "size"), [("ddp", 3), ("none", 1)])
@pytest.mark.parametrize("divisor", [None, 7.0])
def test_any_optimizer_finds_the_sum_divided_as_it_was_asked(
    gloo: ProcessPool, name: str, size: int, divisor: float | None
) -> None:
    net = model()
    for rank in range(size):
        (loss(net, Run(), 0, 0, rank) / (divisor or size)).backward()
    expected = {name: parameter.grad for name, parameter in net.named_parameters()}
    for found in gloo.run(_gradients, name, divisor, world_size=size):
        for key, gradient in expected.items():
            if gradient is None:
                assert found[key] is None, "what nobody has computed would still decay the weight"
            else:
                torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-7)
