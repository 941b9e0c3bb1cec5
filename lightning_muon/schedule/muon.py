"""Makes the program of one ParallelMuon step from matrices, with the owner of every matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lightning_muon.config import Assignment
from lightning_muon.schedule.assign import Load, MatrixSpec, Owners, Traffic, assign_owners, count_elements
from lightning_muon.schedule.program import TRANSFER, Op, OpKind, Program

# Gradients, momenta and weights are counted as float32.
STATE_ITEMSIZE = 4
# AdamW reads gradient, weight and two moments, and writes the last three.
ADAMW_TENSORS = 7


@dataclass(frozen=True, kw_only=True)
class MuonPlan:
    """Plan for the matrices of one exchange group, equal on all of its ranks but for the ranks in ``program``."""

    # For each matrix the ranks (in the group) that run Newton-Schulz for it, ascending. One, except with the strategy
    # `"redundant"`.
    owners: tuple[Owners, ...]
    # The matrices of each bucket, in the order in which backward finishes them; those of a bucket are sent together.
    # Buckets of matrices that lie on one rank alone come first.
    buckets: tuple[tuple[int, ...], ...]
    flops: tuple[int, ...]  # Newton-Schulz load of each rank.
    # For each requested rank the ops of bucket after bucket: `STEP_KINDS`, without empty transfers.
    program: Program


def plan_step(
    specs: Sequence[MatrixSpec],
    *,
    itemsize: int,
    bucket_bytes: int,
    strategy: Assignment = "lpt",
    loads: Sequence[Load] | None = None,
    key_prefix: str = "",
    ranks: Sequence[int] | None = None,
) -> MuonPlan:
    """Assign owners and buckets of the matrices of one exchange group, given in forward order.

    ``bucket_bytes`` bounds what an average owner holds of a bucket, at ``itemsize`` bytes for an element on the wire;
    ``loads`` are the earlier loads of each rank; ``ranks`` are those whose ops are listed, by default all.
    """
    num_ranks = len(specs[0].shards.replica_of)
    costs = [spec.flops for spec in specs]
    sizes = [spec.numel * itemsize for spec in specs]
    sole_holders = [spec.shards.sole_holder for spec in specs]
    buckets = fill_buckets(
        sizes, sole_holders, num_owners=1 if strategy == "redundant" else num_ranks, bucket_bytes=bucket_bytes
    )
    owners = assign_owners(
        buckets,
        costs=costs,
        sizes=sizes,
        sole_holders=sole_holders,
        loads=[(0, 0)] * num_ranks if loads is None else loads,
        strategy=strategy,
    )
    shares = [_shares(bucket, owners, costs) for bucket in buckets]
    flops = [0] * num_ranks
    for rank, (_, cost) in chain.from_iterable(by_rank.items() for by_rank in shares):
        flops[rank] += cost
    group = tuple(range(num_ranks))
    program: Program = {rank: [] for rank in (group if ranks is None else ranks)}
    for number, (bucket, by_rank) in enumerate(zip(buckets, shares, strict=True)):
        moved = count_elements({matrix: owners[matrix] for matrix in bucket}, specs)
        has_gather, has_scatter = any(moved.gather_received), any(map(any, moved.scatter_received))
        for rank, ops in program.items():
            items, cost = by_rank.get(rank, ((), 0))
            work = Op(kind=OpKind.NEWTON_SCHULZ, key=f"{key_prefix}{number}", rank=rank, cost=cost, items=items)
            ops += _around(work, bucket, moved, itemsize, group, has_gather=has_gather, has_scatter=has_scatter)
    return MuonPlan(owners=tuple(owners), buckets=tuple(buckets), flops=tuple(flops), program=program)


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


def _shares(
    bucket: Sequence[int], owners: Sequence[Owners], costs: Sequence[int]
) -> dict[int, tuple[tuple[int, ...], int]]:
    """Rank -> the matrices of a bucket that it owns, and their FLOPs."""
    everyone = owners[bucket[0]]
    if len(everyone) > 1:
        return dict.fromkeys(everyone, (tuple(bucket), sum(costs[matrix] for matrix in bucket)))
    owned: dict[int, list[int]] = {}
    for matrix in bucket:
        owned.setdefault(owners[matrix][0], []).append(matrix)
    return {rank: (tuple(items), sum(costs[matrix] for matrix in items)) for rank, items in owned.items()}


def _around(
    work: Op,
    bucket: tuple[int, ...],
    moved: Traffic,
    itemsize: int,
    group: tuple[int, ...],
    *,
    has_gather: bool,
    has_scatter: bool,
) -> list[Op]:
    """All ops of a bucket on one rank, also if there is nothing to do: a collective needs all ranks."""
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
    if has_gather:
        ops.append(transfer(OpKind.GATHER, (moved.gather_sent[rank], moved.gather_received[rank]), (0, 0)))
    # The received pieces are read and the matrices written; the updates to be sent are read and written.
    work_bytes = 2 * itemsize * moved.owned[rank] + 2 * updates
    ops.append(replace(work, deps=(ops[-1].name,), bytes=work_bytes, memory=updates))
    if has_scatter:
        axes = zip(moved.scatter_sent, moved.scatter_received, strict=True)
        ops.append(transfer(OpKind.SCATTER, *((sent[rank], received[rank]) for sent, received in axes)))
    # The update is read, the weight is read and written.
    update_bytes = (itemsize + 2 * STATE_ITEMSIZE) * held
    ops.append(Op(kind=OpKind.UPDATE, key=key, rank=rank, deps=(ops[-1].name,), bytes=update_bytes, items=bucket))
    return ops
