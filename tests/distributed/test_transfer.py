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
from lightning_muon.optim.transfer import Leg, Transfer
from lightning_muon.params.layout import local_tensor
from lightning_muon.schedule.assign import count_elements
from lightning_muon.schedule.exchange import ExchangeGroup
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
        for number, taken in enumerate(group.buckets):
            kinds = {op.kind for op in group.program[rank] if op.key == f"0.{number}"}
            matrices = tuple(group.matrices[index] for index in taken)
            transfer = Transfer(group, matrices, pool, {"gather": "0", "scatter": "0"})
            pieces = [each.local_view(local_tensor(each.parameter.tensor)).detach() for each in transfer.held]
            transfer.pack(transfer.held, pieces)
            for work in _start(transfer, transfer.gather) if "gather" in kinds else ():
                work.wait()
            wholes = {matrix: torch.full(matrix.box.shape, float("nan")) for matrix in transfer.owned}
            transfer.unpack(wholes)
            for matrix, whole in wholes.items():
                is_right &= torch.equal(whole, full[group.matrices.index(matrix)])
            transfer.pack_updates({matrix: 2 * whole for matrix, whole in wholes.items()})
            for work in _start(transfer, transfer.scatter) if "scatter" in kinds else ():
                work.wait()
            updates = transfer.updates()
            for matrix, piece in zip(transfer.held, pieces, strict=True):
                is_right &= torch.equal(updates[matrix], 2 * piece)
    planned = count_elements(group.matrices, group.replica_of)
    floors = (
        2 * (matrix.numel - (own[0].numel if own else 0)) + (len(matrix.held) - 1) * matrix.numel
        for matrix in group.matrices
        for own in [[piece for rank, piece in matrix.pieces.items() if rank == matrix.owners[0]]]
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
