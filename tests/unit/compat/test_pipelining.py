"""The private names of torch that pipelines lean on still exist and still mean the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_muon.compat.pipelining import backward_input, backward_weight, reduce_gradients, unreduced_gradients


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


def test_a_backward_in_two_parts_has_the_gradients_of_a_whole_one() -> None:
    x, gradient = torch.randn(5, 3), torch.randn(5, 2)
    of_input, of_weights = _expected(x, gradient)
    net, leaf = _net(), x.clone().requires_grad_()
    rest = backward_input([net(leaf)], [gradient], [leaf], net.parameters())
    assert torch.equal(leaf.grad, of_input)  # type: ignore[arg-type]
    assert all(parameter.grad is None for parameter in net.parameters())
    backward_weight(net.parameters(), rest)
    for parameter, expected in zip(net.parameters(), of_weights, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


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
            backward_weight(net.parameters(), backward_input([net(leaf)], [gradient], [leaf], net.parameters()))
        else:
            net(leaf).backward(gradient)
    found = unreduced_gradients(root)
    assert len(found) == 4 and all(whole.shape == gradient.shape for whole, gradient in found)
    for _, each in found:
        each.mul_(0.5)
    reduce_gradients(root)
    assert unreduced_gradients(root) == []
    for parameter, wanted in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted)  # type: ignore[union-attr]
