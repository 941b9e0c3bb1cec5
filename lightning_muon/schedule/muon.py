"""Buckets of matrices, and the ops of a bucket with what they compute, read and send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lightning_muon.params.matrices import Matrix
from lightning_muon.schedule.assign import Traffic, count_elements
from lightning_muon.schedule.program import TRANSFER, Op, OpKind

# Gradients, momenta and weights are counted as float32.
STATE_ITEMSIZE = 4
# AdamW reads gradient, weight and two moments, and writes the last three.
ADAMW_TENSORS = 7


def fill_buckets(
    sizes: Sequence[int], sole_holders: Sequence[int | None], *, num_owners: int, bucket_bytes: int
) -> list[tuple[int, ...]]:
    """Indices of the matrices of each bucket, the last matrix first: backward finishes gradients about in this order.

    A bucket is closed when it has a matrix for each owner and the next one would take it above ``num_owners *
    bucket_bytes``. Matrices that lie on one rank alone come first, in buckets of their own, with at most
    ``bucket_bytes`` per rank: each rank fills its own sequence of buckets, so that all ranks have work in each of them.
    """
    resident: list[list[int]] = []
    travelling: list[list[int]] = []
    # Sole holder, or None -> number of the bucket that is being filled, and its matrices and bytes so far.
    state: dict[int | None, tuple[int, int, int]] = {}
    for matrix in reversed(range(len(sizes))):
        holder = sole_holders[matrix]
        buckets, least = (travelling, num_owners) if holder is None else (resident, 1)
        number, count, filled = state.get(holder, (0, 0, 0))
        if count >= least and filled + sizes[matrix] > least * bucket_bytes:
            number, count, filled = number + 1, 0, 0
        state[holder] = (number, count + 1, filled + sizes[matrix])
        if number == len(buckets):
            buckets.append([])
        buckets[number].append(matrix)
    return [tuple(bucket) for bucket in (*resident, *travelling)]


def ops_of_bucket(
    key: str, bucket: Mapping[int, Matrix], replica_of: Sequence[int], itemsize: int, ranks: Iterable[int]
) -> dict[int, list[Op]]:
    """Rank -> all ops of a bucket, number -> matrix, also if it has nothing to do: a collective needs all ranks.

    ``replica_of`` is the replica of each rank of the exchange group.
    """
    matrices = list(bucket.values())
    moved = count_elements(matrices, replica_of)
    work: dict[int, tuple[list[int], int]] = {}  # Rank -> the matrices that it owns, and their FLOPs.
    if len(matrices[0].owners) > 1:
        work = dict.fromkeys(matrices[0].owners, (list(bucket), sum(matrix.flops for matrix in matrices)))
    else:
        for number, matrix in bucket.items():
            numbers, flops = work.get(matrix.owners[0], ([], 0))
            work[matrix.owners[0]] = [*numbers, number], flops + matrix.flops
    group = tuple(range(len(replica_of)))
    ops: dict[int, list[Op]] = {}
    for rank in ranks:
        owned, flops = work.get(rank, ([], 0))
        orthogonalize = Op(kind=OpKind.NEWTON_SCHULZ, key=key, rank=rank, cost=flops, items=tuple(owned))
        ops[rank] = _around(orthogonalize, tuple(bucket), moved, itemsize, group)
    return ops


def _around(work: Op, bucket: tuple[int, ...], moved: Traffic, itemsize: int, group: tuple[int, ...]) -> list[Op]:
    """All ops of a bucket on one rank, whose ``work`` is Newton-Schulz."""
    key, rank = work.key, work.rank

    def transfer(kind: str, *moves: tuple[int, int]) -> Op:
        """Op that sends ``moves``: elements sent and received, within the replica and between replicas."""
        sent, received = (sum(column) * itemsize for column in zip(*moves, strict=True))
        return Op(
            kind=kind,
            key=key,
            rank=rank,
            deps=(ops[-1].name,),
            lane=TRANSFER,
            bytes=max(sent, received),
            axis_bytes=tuple(max(pair) * itemsize for pair in moves),
            memory=received,
            items=bucket,
            group=group,
        )

    held, packed = moved.held[rank], moved.gather_sent[rank] * itemsize
    updates = sum(sent[rank] for sent in moved.scatter_sent) * itemsize
    # The gradient is read, the momentum is read and written, and the pieces for the owners are written.
    momentum_bytes = 3 * STATE_ITEMSIZE * held + packed
    ops = [Op(kind=OpKind.MOMENTUM, key=key, rank=rank, bytes=momentum_bytes, memory=packed, items=bucket)]
    if moved.has_gather:
        ops.append(transfer(OpKind.GATHER, (moved.gather_sent[rank], moved.gather_received[rank]), (0, 0)))
    # The received pieces are read and the matrices written; the updates to be sent are read and written.
    work_bytes = 2 * itemsize * moved.owned[rank] + 2 * updates
    ops.append(replace(work, deps=(ops[-1].name,), bytes=work_bytes, memory=updates))
    if moved.has_scatter:
        axes = zip(moved.scatter_sent, moved.scatter_received, strict=True)
        ops.append(transfer(OpKind.SCATTER, *((sent[rank], received[rank]) for sent, received in axes)))
    # The update is read, the weight is read and written.
    update_bytes = (itemsize + 2 * STATE_ITEMSIZE) * held
    ops.append(Op(kind=OpKind.UPDATE, key=key, rank=rank, deps=(ops[-1].name,), bytes=update_bytes, items=bucket))
    return ops
