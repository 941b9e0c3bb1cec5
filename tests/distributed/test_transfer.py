"""Pieces to owners and back: what arrives, and how many bytes leave a rank."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_muon.comm.collectives import BufferPool
from lightning_muon.optim import transfer as transfer_module
from lightning_muon.optim.step_plan import ExchangeGroup
from lightning_muon.optim.transfer import Leg, Transfer
from lightning_muon.params.layout import local_tensor
from lightning_muon.schedule.assign import MatrixSpec, count_elements
from tests.support.processes import ProcessPool
from tests.support.step_plans import plan_for

SHAPES = [(13, 7), (1, 9), (6, 6), (2, 50), (9, 4)]


def _group(mesh_shape: tuple[int, ...], assignment: str, num_sharded: int) -> tuple[ExchangeGroup, list[Tensor]]:
    """Matrices of which the last axes of the mesh shard the first dimensions."""
    mesh = init_device_mesh("cpu", mesh_shape)
    torch.manual_seed(0)
    full = [torch.randn(shape) for shape in SHAPES]
    placements = [*[Replicate()] * (len(mesh_shape) - num_sharded), *map(Shard, range(num_sharded))]
    placed = [distribute_tensor(tensor, mesh, placements) for tensor in full]
    return plan_for(placed, mesh, assignment=assignment, itemsize=4).exchange_groups[0], full


class _Wire:
    """Counts the elements that leave this rank for each other one."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()

    def all_to_all(self, *, to: Any, **rest: Any) -> Any:
        self.sent.update(dict(enumerate(to)))
        return self._all_to_all(to=to, **rest)

    def messages(self, send: dict[int, Tensor], *rest: Any) -> Any:
        self.sent.update({rank: tensor.numel() for rank, tensor in send.items()})
        return self._messages(send, *rest)

    _all_to_all = staticmethod(transfer_module.start_all_to_all)
    _messages = staticmethod(transfer_module.start_messages)


def _start(transfer: Transfer, leg: Leg) -> Any:
    send, receive = transfer.buffer(leg, is_sent=True), transfer.buffer(leg, is_sent=False)
    return leg.start(send=send, receive=receive, group=transfer.group.axes)


def _there_and_back(mesh_shape: tuple[int, ...], assignment: str, num_sharded: int) -> dict[str, Any]:
    """Send every matrix, double it on its owner, bring it back."""
    group, full = _group(mesh_shape, assignment, num_sharded)
    rank, wire, is_right = group.axes.rank, _Wire(), True
    pool = BufferPool(torch.float32, torch.device("cpu"))
    with (
        mock.patch.object(transfer_module, "start_all_to_all", wire.all_to_all),
        mock.patch.object(transfer_module, "start_messages", wire.messages),
    ):
        for number, taken in enumerate(group.plan.buckets):
            kinds = {op.kind for op in group.plan.program[rank] if op.key == f"0.{number}"}
            transfer = Transfer(group, taken, pool, {"gather": "0", "scatter": "0"})
            pieces = [job.local_view(local_tensor(job.parameter.tensor)).detach() for job in transfer.jobs]
            transfer.pack(transfer.jobs, pieces)
            for work in _start(transfer, transfer.gather) if "gather" in kinds else ():
                work.wait()
            matrices = {job: torch.full(job.matrix.box.shape, float("nan")) for job in transfer.owned}
            transfer.unpack(matrices)
            for job, matrix in matrices.items():
                is_right &= torch.equal(matrix, full[group.jobs.index(job)])
            transfer.pack_updates({job: 2 * matrix for job, matrix in matrices.items()})
            for work in _start(transfer, transfer.scatter) if "scatter" in kinds else ():
                work.wait()
            updates = transfer.updates()
            for job, piece in zip(transfer.jobs, pieces, strict=True):
                is_right &= torch.equal(updates[job], 2 * piece)
    specs = [
        MatrixSpec(
            name="",
            rows=job.matrix.rows,
            cols=job.matrix.cols,
            flops=1,
            shards=job.pieces.on_ranks,
        )
        for job in group.jobs
    ]
    planned = count_elements(dict(enumerate(group.plan.owners)), specs)
    floors = (
        2 * (spec.numel - spec.shards.held[owner]) + (len(spec.shards.by_replica) - 1) * spec.numel
        for spec, (owner, *_) in zip(specs, group.plan.owners, strict=True)
    )
    return {
        "is_right": is_right,
        "sent": wire.sent.total(),
        "planned": sum(sent[rank] for sent in (planned.gather_sent, *planned.scatter_sent)),
        "floor": sum(floors),
        "between": sum(n for peer, n in wire.sent.items() if group.replica_of[peer] != group.replica_of[rank]),
    }


@pytest.mark.parametrize("assignment", ["lpt", "round_robin", "redundant"])
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (4,), (2, 2)], ids=str)
def test_matrices_arrive_whole_and_updates_come_back(
    gloo: ProcessPool, mesh_shape: tuple[int, ...], assignment: str
) -> None:
    numel = sum(rows * cols for rows, cols in SHAPES)
    for num_sharded in range(len(mesh_shape) + 1):
        results = gloo.run(
            _there_and_back, mesh_shape, assignment, num_sharded, world_size=torch.Size(mesh_shape).numel()
        )
        for result in results:
            assert result["is_right"]
            assert result["sent"] == result["planned"]
        sent = sum(result["sent"] for result in results)
        if assignment == "lpt" and num_sharded == 1:
            assert sent == results[0]["floor"], "one owner moves no more than it must"
            # Replicas get each update once and nothing else.
            assert sum(result["between"] for result in results) == (numel if mesh_shape == (2, 2) else 0)
        if assignment == "lpt" and num_sharded == 0:
            assert sent == (torch.Size(mesh_shape).numel() - 1) * numel, "replicated matrices need no gather"
