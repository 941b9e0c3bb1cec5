"""The private names of torch that pipelines lean on still exist and still mean the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_muon.compat.torch import accumulate_gradients, finish_reducing, start_reducing, unreduced_gradients
from lightning_muon.pipeline.backward import backward_input, backward_weight


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _expected(x: Tensor, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    net, leaf = _net(), x.detach().clone().requires_grad_()
    net(leaf).backward(gradient)
    return leaf.grad, [parameter.grad for parameter in net.parameters()]  # type: ignore[return-value]


@pytest.mark.parametrize("num_passes", [1, 3])
def test_weight_gradients_are_summed_in_the_dtype_of_reductions(mesh: DeviceMesh, num_passes: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    root = fully_shard(_net(), mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(False)
    for _ in range(num_passes):
        leaf = torch.randn(5, 3).requires_grad_()
        _, rest = backward_input([root(leaf)], [torch.randn(5, 2).bfloat16()], [leaf])
        backward_weight(rest)
        accumulate_gradients(root)
        assert [each.dtype for each in unreduced_gradients(root)] == [torch.float32] * 4


@pytest.mark.parametrize("is_split", [False, True])
def test_the_sum_of_unreduced_gradients_is_reduced_on_demand(mesh: DeviceMesh, is_split: bool) -> None:
    x, gradient = torch.randn(5, 3), torch.randn(5, 2)
    _, expected = _expected(x, gradient)
    net = _net()
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    root = fully_shard(net, mesh=mesh, reshard_after_forward=False)
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(False)
    assert unreduced_gradients(root) == []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        if is_split:
            _, rest = backward_input([net(leaf)], [gradient], [leaf])
            backward_weight(rest)
        else:
            net(leaf).backward(gradient)
    found = unreduced_gradients(root)
    assert len(found) == 4
    for each in found:
        each.mul_(0.5)
    start_reducing(root)
    finish_reducing(root)
    assert unreduced_gradients(root) == []
    for parameter, wanted in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted)  # type: ignore[union-attr]
