"""Pieces to owners and back: what arrives, and how many bytes leave a rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_muon.comm.exchange import BufferPool
from lightning_muon.optim import transfer as transfer_module
from lightning_muon.optim.binding import BoundParameter, ExchangeGroup, bind, local_tensor
from lightning_muon.optim.meshes import group_by_mesh
from lightning_muon.optim.transfer import make_transfer
from lightning_muon.params.routing import route_by_shape
from tests.support.processes import ProcessPool

SHAPES = [(13, 7), (1, 9), (6, 6), (2, 50), (9, 4)]


def _group(*, is_replicated: bool) -> tuple[ExchangeGroup, list[Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    full = [torch.randn(shape) for shape in SHAPES]
    placed = full if is_replicated else [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in full]
    parameters = [
        BoundParameter(nn.Parameter(t), {"ns_steps": 5}, route_by_shape(f"w{i}", tuple(t.shape)), mesh)
        for i, t in enumerate(placed)
    ]
    meshes = group_by_mesh([parameter.tensor for parameter in parameters], mesh)
    (group,) = bind(parameters, meshes, itemsize=4, chunk_bytes=10**6, settings="").exchange_groups
    return group, full


def _there_and_back(is_replicated: bool) -> tuple[bool, int, int]:
    """Send every matrix, double it on its owner, bring it back. Returns correctness, sent elements, and the floor."""
    group, full = _group(is_replicated=is_replicated)
    rank = group.axes.rank
    pool = BufferPool(torch.float32, torch.device("cpu"))
    sent: list[int] = []

    def count(send: Tensor, to: Any, *rest: Any) -> Any:
        sent.append(to.numel)
        return start(send, to, *rest)

    start = transfer_module.start_all_to_all
    is_right, floor = True, 0
    with mock.patch.object(transfer_module, "start_all_to_all", count):
        for taken in (*group.plan.resident, *group.plan.chunks):
            transfer = make_transfer(group, taken, pool, 0, is_resident=taken in group.plan.resident)
            pieces = [job.local_view(local_tensor(job.parameter.tensor), rank).detach() for job in transfer.jobs]
            transfer.start_gather(pieces)
            matrices = transfer.matrices()
            for job, matrix in zip(transfer.owned, matrices, strict=True):
                is_right &= torch.equal(matrix, full[group.jobs.index(job)])
            transfer.start_scatter([2 * matrix for matrix in matrices])
            for piece, update in zip(pieces, transfer.updates(), strict=True):
                is_right &= torch.equal(update, 2 * piece)
            for index in taken:
                held, owner = group.jobs[index].pieces[rank].numel, group.plan.owners[index]
                floor += held if owner != rank else SHAPES[index][0] * SHAPES[index][1] - held
    return is_right, sum(sent), floor


def test_matrices_arrive_whole_and_updates_come_back_to_their_shards(gloo: ProcessPool) -> None:
    for world_size in (2, 3, 4):
        for is_right, sent, floor in gloo.run(_there_and_back, False, world_size=world_size):
            assert is_right
            # To the owners go the pieces of others' matrices, back go the others' pieces of own ones: nothing twice.
            assert sent == floor


def test_replicated_matrices_need_no_gather(gloo: ProcessPool) -> None:
    for is_right, sent, _ in gloo.run(_there_and_back, True, world_size=3):
        assert is_right
        assert sent == 0
