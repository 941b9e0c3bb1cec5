"""No rank waits for a connection that another rank does not open, whichever gradients a rank lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_muon import DCTTopK, FlexDeMo, Full, ModeOptions, ParallelMuon, make_mode
from lightning_muon.comm.mesh import axis_group
from tests.support.lazy_connections import nccl_like_mesh
from tests.support.processes import ProcessPool, RanksFailedError

_NUM_LAYERS = 4


def _model() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(24, 24) for _ in range(_NUM_LAYERS)])


def _loss(model: nn.ModuleList, *, skips: bool) -> Tensor:
    """Rank 1 may skip a layer in the middle of the order of backward; its messages come later than those of rank 0."""
    x = torch.randn(8, 24)
    for index, layer in enumerate(model):
        if not (skips and dist.get_rank() == 1 and index == _NUM_LAYERS - 1):
            x = layer(x)
    return x.square().mean()


def _train(name: str, shape: tuple[int, ...], first_skip: int) -> bool:
    model, mesh = _model(), nccl_like_mesh(*shape)
    mode = make_mode(name, mesh, ModeOptions(bucket_bytes=3000))
    mode.prepare(model)
    optimizer = ParallelMuon(model, lr=1e-3)
    mode.attach(model, [optimizer])
    for step in range(3):
        _loss(model, skips=step >= first_skip).backward()
        mode.finish_gradients()
        optimizer.step()
        mode.end_step()
        mode.finish_parameters()
        optimizer.zero_grad()
    mode.close()
    return True


@pytest.mark.parametrize("first_skip", [0, 1], ids=["from_the_first_step", "from_the_second_step"])
@pytest.mark.parametrize(("name", "shape"), [("zero2", (2,)), ("zero2", (2, 2)), ("ddp", (2,))], ids=str)
def test_replicas_train_where_a_rank_lacks_a_gradient(
    gloo: ProcessPool, name: str, shape: tuple[int, ...], first_skip: int
) -> None:
    size = torch.Size(shape).numel()
    assert all(gloo.run(_train, name, shape, first_skip, world_size=size))
