import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon.sharding.mode import ModeOptions
from lightning_muon.sharding.modes import make_mode
from tests.support.processes import ProcessPool


def _gradient(divisor: float | None) -> float:
    net = nn.Linear(1, 1, bias=False)
    mode = make_mode("none", init_device_mesh("cpu", (1,)), ModeOptions())
    mode.prepare(net)
    mode.attach(net, [torch.optim.SGD(net.parameters())])
    mode.set_gradient_divisor(divisor)
    with mode.no_sync():
        net(torch.ones(1, 1)).sum().backward()
    net(torch.ones(1, 1)).sum().backward()
    mode.finish_gradients()
    mode.finish_gradients()  # Again before clipping, for example: nothing is divided twice.
    assert net.weight.grad is not None
    return net.weight.grad.item()


def test_one_process_divides_by_what_it_is_told(gloo: ProcessPool) -> None:
    assert gloo.run(_gradient, None, world_size=1) == [2.0]
    assert gloo.run(_gradient, 8.0, world_size=1) == [0.25]


def _added() -> None:
    net = nn.Linear(1, 1, bias=False)
    mode = make_mode("none", init_device_mesh("cpu", (1,)), ModeOptions())
    mode.attach(net, [])
    mode.set_gradient_divisor(3.0)
    for _ in range(2):
        net(torch.ones(1, 1)).sum().backward()
        mode.finish_gradients()


def test_a_pass_that_adds_to_divided_gradients_is_an_error(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_added, world_size=1, match="zero_grad")


def _two() -> None:
    make_mode("none", init_device_mesh("cpu", (dist.get_world_size(),)), ModeOptions()).prepare(nn.Linear(1, 1))


def test_several_ranks_are_an_error(gloo: ProcessPool) -> None:
    gloo.run(_two, world_size=1)
    gloo.expect_error_on_all_ranks(_two, world_size=2, match="there are 2 data-parallel ranks")
