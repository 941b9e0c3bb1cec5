"""Front end: matrices -> the program of one ParallelMuon step, with the owner of every matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lightning_muon.schedule.assign import Load, Strategy, assign_owners
from lightning_muon.schedule.program import TRANSFER, Op, OpKind, Program
from lightning_muon.schedule.traffic import MatrixSpec, Owners, Traffic, count_elements

# Gradients, momenta and weights are counted as float32.
STATE_ITEMSIZE = 4


@dataclass(frozen=True, kw_only=True)
class MuonPlan:
    """Plan for the matrices of one exchange group, equal on all of its ranks but for the ranks in ``program``."""

    # For each matrix the ranks (in the group) that run Newton-Schulz for it, ascending. One, but for the strategy
    # `"redundant"`.
    owners: tuple[Owners, ...]
    # The matrices of each bucket, in the order in which backward finishes them; those of a bucket travel together.
    # Buckets of matrices that lie on one rank alone come first.
    buckets: tuple[tuple[int, ...], ...]
    flops: tuple[int, ...]  # Newton-Schulz load of each rank.
    # For each rank that was asked for the ops of bucket after bucket: momentum, gather, newton_schulz, scatter, update.
    program: Program


def plan_step(
    specs: Sequence[MatrixSpec],
    *,
    itemsize: int,
    chunk_bytes: int,
    strategy: Strategy = "lpt",
    loads: Sequence[Load] | None = None,
    key_prefix: str = "",
    ranks: Sequence[int] | None = None,
) -> MuonPlan:
    """Assign owners and buckets of the matrices of one exchange group, which are in forward order; serial.

    ``chunk_bytes`` bounds what an average owner holds of a bucket, at ``itemsize`` bytes for an element on the wire;
    ``loads`` are what each rank has to do already; ``ranks`` are those whose ops to list, all by default.
    """
    replica_of = specs[0].shards.replica_of
    num_ranks = len(replica_of)
    costs = [spec.flops for spec in specs]
    sizes = [spec.numel * itemsize for spec in specs]
    sole_holders = [spec.shards.sole_holder for spec in specs]
    buckets = fill_buckets(
        sizes, sole_holders, num_owners=1 if strategy == "redundant" else num_ranks, chunk_bytes=chunk_bytes
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
    traffic = [count_elements({matrix: owners[matrix] for matrix in bucket}, specs) for bucket in buckets]
    # A plan none of whose gathers moves anything (replicated parameters) has no gathers, and one none of whose scatters
    # does (every rank owns everything) has no scatters.
    wire = _Wire(
        group=tuple(range(num_ranks)),
        itemsize=itemsize,
        has_replicas=len(set(replica_of)) > 1,
        has_gathers=any(any(each.gather_received) for each in traffic),
        has_scatters=any(any(received) for each in traffic for received in each.scatter_received),
    )
    program: Program = {rank: [] for rank in (range(num_ranks) if ranks is None else ranks)}
    for number, (bucket, by_rank, moved) in enumerate(zip(buckets, shares, traffic, strict=True)):
        travels = sole_holders[bucket[0]] is None
        for rank, ops in program.items():
            items, cost = by_rank.get(rank, ((), 0))
            work = Op(kind=OpKind.NEWTON_SCHULZ, key=f"{key_prefix}{number}", rank=rank, cost=cost, items=items)
            ops += _around(work, bucket, moved, wire, travels=travels)
    return MuonPlan(owners=tuple(owners), buckets=tuple(buckets), flops=tuple(flops), program=program)


def fill_buckets(
    sizes: Sequence[int], sole_holders: Sequence[int | None], *, num_owners: int, chunk_bytes: int
) -> list[tuple[int, ...]]:
    """Indices of the matrices of each bucket, the last matrix first: backward finishes gradients about in this order.

    A bucket is closed when it has a matrix for each owner and the next one would take it above ``num_owners *
    chunk_bytes``. Matrices that lie on one rank alone come first, in buckets of their own, with at most ``chunk_bytes``
    per rank: each rank fills its own sequence of buckets, so that all ranks have work in bucket after bucket.
    """
    resident: list[list[int]] = []
    travelling: list[list[int]] = []
    # Sole holder, or None -> number of the bucket that is being filled, and its matrices and bytes so far.
    state: dict[int | None, tuple[int, int, int]] = {}
    for matrix in reversed(range(len(sizes))):
        holder = sole_holders[matrix]
        buckets, least = (travelling, num_owners) if holder is None else (resident, 1)
        number, count, filled = state.get(holder, (0, 0, 0))
        if count >= least and filled + sizes[matrix] > least * chunk_bytes:
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


@dataclass(frozen=True, kw_only=True)
class _Wire:
    """What the transfers of a plan have in common."""

    group: tuple[int, ...]
    itemsize: int
    has_replicas: bool
    has_gathers: bool
    has_scatters: bool


def _around(work: Op, bucket: tuple[int, ...], moved: Traffic, wire: _Wire, *, travels: bool) -> list[Op]:
    """All ops of a bucket on one rank, also if there is nothing to do: a collective needs all ranks."""
    key, rank, itemsize = work.key, work.rank, wire.itemsize
    held, packed = moved.held[rank], moved.gather_sent[rank] * itemsize
    updates = sum(sent[rank] for sent in moved.scatter_sent) * itemsize
    # The gradient is read, the momentum is read and written, and the pieces for the owners are written.
    momentum_bytes = 3 * STATE_ITEMSIZE * held + packed
    ops = [Op(kind=OpKind.MOMENTUM, key=key, rank=rank, bytes=momentum_bytes, memory=packed, items=bucket)]
    if wire.has_gathers and travels:
        moves = [(moved.gather_sent[rank], moved.gather_received[rank]), (0, 0)]
        ops.append(_transfer(OpKind.GATHER, ops[-1], bucket, moves, wire))
    # What came is read and the wholes are written; of the updates, what goes is read and written.
    work_bytes = 2 * itemsize * moved.owned[rank] + 2 * updates
    ops.append(replace(work, deps=(ops[-1].name,), bytes=work_bytes, memory=updates))
    if wire.has_scatters and travels:
        moves = [(sent[rank], got[rank]) for sent, got in zip(moved.scatter_sent, moved.scatter_received, strict=True)]
        ops.append(_transfer(OpKind.SCATTER, ops[-1], bucket, moves, wire))
    # The update is read, the weight is read and written.
    update_bytes = (itemsize + 2 * STATE_ITEMSIZE) * held
    ops.append(Op(kind=OpKind.UPDATE, key=key, rank=rank, deps=(ops[-1].name,), bytes=update_bytes, items=bucket))
    return ops


def _transfer(kind: str, before: Op, bucket: tuple[int, ...], moves: Sequence[tuple[int, int]], wire: _Wire) -> Op:
    """Of ``moves``, elements sent and received, within the replica and between replicas."""
    sent, received = (sum(column) * wire.itemsize for column in zip(*moves, strict=True))
    return Op(
        kind=kind,
        key=before.key,
        rank=before.rank,
        deps=(before.name,),
        lane=TRANSFER,
        bytes=max(sent, received),
        axis_bytes=tuple(max(pair) * wire.itemsize for pair in moves) if wire.has_replicas else (),
        memory=received,
        items=bucket,
        group=wire.group,
    )
