"""The modes by name, what optimizers they take, and the mode of a single process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon import ParallelMuon, ParallelMuonStrategy
from lightning_muon.params.layout import Layout
from lightning_muon.sharding.base import ModeOptions, attach_optimizers, is_attachable
from lightning_muon.sharding.modes import MODES, SingleProcess, make_mode
from tests.support.processes import ProcessPool


class _Fourth(SingleProcess):
    name = "fourth"
    takes = frozenset({"wrap_policy"})


def test_another_mode_needs_no_change_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "fourth", _Fourth)
    ParallelMuonStrategy(sharding="fourth", wrap_policy=())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_bytes=5 means nothing with sharding='fourth'"):
        ParallelMuonStrategy(sharding="fourth", bucket_bytes=5)  # type: ignore[arg-type]


def test_an_unknown_mode_is_an_error_that_lists_the_known_ones() -> None:
    mesh: Any = None
    with pytest.raises(ValueError, match=r"one of \('fsdp', 'zero2', 'ddp', 'none'\), got 'zero3'"):
        make_mode("zero3", mesh, ModeOptions())


def test_only_optimizers_that_can_be_attached_are() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    ours, theirs = ParallelMuon(net[0].parameters()), torch.optim.SGD(net[1].parameters(), momentum=0.9)
    assert is_attachable(ours) and not is_attachable(theirs)
    attach_optimizers(net, [ours, theirs], Layout())
    assert [route.name for route in ours.routes] == ["0.weight", "0.bias"]
    assert len(ours.state) == 2 and not theirs.state


def _gradient(divisor: float | None, *, is_finished_between: bool = False) -> float:
    net = nn.Linear(1, 1, bias=False)
    mode = make_mode("none", init_device_mesh("cpu", (dist.get_world_size(),)), ModeOptions())
    mode.prepare(net)
    mode.attach(net, [torch.optim.SGD(net.parameters())])
    mode.set_gradient_divisor(divisor)
    with mode.no_sync():
        net(torch.ones(1, 1)).sum().backward()
    if is_finished_between:
        mode.finish_gradients()
    net(torch.ones(1, 1)).sum().backward()
    mode.finish_gradients()
    mode.finish_gradients()  # Again before clipping, for example: nothing is divided twice.
    assert net.weight.grad is not None
    return net.weight.grad.item()


def test_one_process_divides_by_what_it_is_told(gloo: ProcessPool) -> None:
    assert gloo.run(_gradient, None, world_size=1) == [2.0]
    assert gloo.run(_gradient, 8.0, world_size=1) == [0.25]


@pytest.mark.parametrize(("world_size", "match"), [(1, "zero_grad"), (2, "there are 2 data-parallel ranks")])
def test_added_passes_and_several_ranks_are_errors(gloo: ProcessPool, world_size: int, match: str) -> None:
    gloo.expect_error_on_all_ranks(_gradient, 3.0, is_finished_between=True, world_size=world_size, match=match)
