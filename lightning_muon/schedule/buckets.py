"""Turn "who runs Newton-Schulz for what" into the ops of a step: momentum, gather, Newton-Schulz, scatter, update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_muon.schedule.matrix_shards import ShardedMatrices
from lightning_muon.schedule.program import GATHER, MOMENTUM, NEWTON_SCHULZ, SCATTER, UNASSIGNED, UPDATE, Op, Program
from lightning_muon.schedule.traffic import Owners, RankTraffic, count_elements

# Gradients, momenta and weights are counted as float32.
STATE_ITEMSIZE = 4
_NOTHING = RankTraffic()


@dataclass(frozen=True)
class _Bucket:
    """A bucket with what each rank of the group holds, owns, sends and receives, in elements; no entry is nothing."""

    key: str
    matrices: tuple[int, ...]
    is_resident: bool
    traffic: Mapping[int, RankTraffic]


def insert_communication(
    program: Program,
    where: ShardedMatrices,
    *,
    itemsize: int,
    buckets: Sequence[Op],
    keep_idle: bool = True,
    ranks: Sequence[int] | None = None,
) -> Program:
    """Surround each Newton-Schulz op by momentum, gather, scatter and update.

    Every rank gets the ops of every bucket, even with nothing to do: a collective needs all ranks. Matrices that
    lie on one rank alone stay there, so their buckets have no gather and no scatter. A plan none of whose gathers moves
    anything (replicated parameters) has no gathers, and one none of whose scatters does (every rank owns everything)
    has no scatters.

    Args:
        program: The Newton-Schulz ops of each rank.
        where: Which rank holds what.
        itemsize: Bytes of an element on the wire.
        buckets: One op per bucket, with its key and all its matrices.
        keep_idle: Also list the ops of buckets without communication on ranks that hold nothing of them.
        ranks: Whose ops to return; all by default.
    """
    owners = owners_of(program, len(where.specs))
    holders = where.sole_holders()
    counted = [_count(op, owners, holders, where) for op in buckets]
    everything = [each for bucket in counted if not bucket.is_resident for each in bucket.traffic.values()]
    wire = _Wire(
        group=tuple(range(where.num_ranks)),
        itemsize=itemsize,
        has_replicas=len(set(where.replica_of)) > 1,
        gathers=any(any(each.gather_received) for each in everything),
        scatters=any(any(each.scatter_received) for each in everything),
    )
    inserted: Program = {}
    for rank in program if ranks is None else ranks:
        owned = {op.key: op for op in program[rank]}
        inserted[rank] = []
        for bucket in counted:
            if keep_idle or not bucket.is_resident or rank in bucket.traffic:
                inserted[rank] += _ops_of(rank, bucket, owned.get(bucket.key), wire)
    return inserted


def _count(bucket: Op, owners: Sequence[Owners], holders: Sequence[int | None], where: ShardedMatrices) -> _Bucket:
    if any(holders[item] is None for item in bucket.items):
        counts = count_elements({item: owners[item] for item in bucket.items}, where)
        return _Bucket(bucket.key, bucket.items, is_resident=False, traffic=dict(enumerate(counts)))
    held: dict[int, int] = {}
    for item in bucket.items:
        rank = owners[item][0]
        held[rank] = held.get(rank, 0) + where.specs[item].numel
    traffic = {rank: RankTraffic(held=numel, owned=numel) for rank, numel in held.items()}
    return _Bucket(bucket.key, bucket.items, is_resident=True, traffic=traffic)


def owners_of(program: Program, num_matrices: int) -> list[Owners]:
    """Read off the owners of each matrix, ascending; ranks that share one tuple of matrices share one of owners."""
    ranks_of: dict[int, list[int]] = {}
    items_of: dict[int, tuple[int, ...]] = {}
    for rank in sorted(program):
        for op in program[rank]:
            if op.kind == NEWTON_SCHULZ and op.items:
                ranks_of.setdefault(id(op.items), []).append(rank)
                items_of[id(op.items)] = op.items
    owners: list[Owners] = [()] * num_matrices
    for identity, items in items_of.items():
        ranks = tuple(ranks_of[identity])
        for item in items:
            owners[item] = ranks if not owners[item] else tuple(sorted(owners[item] + ranks))
    return owners


@dataclass(frozen=True, kw_only=True)
class _Wire:
    """What the transfers of a plan have in common."""

    group: tuple[int, ...]
    itemsize: int
    has_replicas: bool
    gathers: bool
    scatters: bool


def _ops_of(rank: int, bucket: _Bucket, owned: Op | None, wire: _Wire) -> list[Op]:
    """The ops of one rank and bucket in their order, each of which needs the one before."""
    count, itemsize, key = bucket.traffic.get(rank, _NOTHING), wire.itemsize, bucket.key
    packed = sum(count.gather_sent) * itemsize
    to_send = sum(count.scatter_sent) * itemsize
    # The gradient is read, the momentum is read and written, and the pieces for the owners are written.
    momentum_bytes = 3 * STATE_ITEMSIZE * count.held + packed
    momentum = Op(kind=MOMENTUM, key=key, rank=rank, bytes=momentum_bytes, memory=packed, items=bucket.matrices)
    ops = [momentum]
    if wire.gathers and not bucket.is_resident:
        ops.append(_transfer(GATHER, ops[-1], bucket, wire, sent=count.gather_sent, received=count.gather_received))
    newton_schulz = Op(
        kind=NEWTON_SCHULZ,
        key=key,
        rank=rank,
        cost=owned.cost if owned is not None else 0,
        deps=(ops[-1].name,),
        # What came is read and the wholes are written; of the updates, what goes is read and written.
        bytes=2 * itemsize * count.owned + 2 * to_send,
        memory=to_send,
        items=owned.items if owned is not None else (),
    )
    ops.append(newton_schulz)
    if wire.scatters and not bucket.is_resident:
        ops.append(_transfer(SCATTER, ops[-1], bucket, wire, sent=count.scatter_sent, received=count.scatter_received))
    # The update is read, the weight is read and written.
    update_bytes = (itemsize + 2 * STATE_ITEMSIZE) * count.held
    before = (ops[-1].name,)
    ops.append(Op(kind=UPDATE, key=key, rank=rank, deps=before, bytes=update_bytes, items=bucket.matrices))
    return ops


def _transfer(
    kind: str, before: Op, bucket: _Bucket, wire: _Wire, *, sent: tuple[int, int], received: tuple[int, int]
) -> Op:
    size = wire.itemsize
    by_axis = (max(sent[0], received[0]) * size, max(sent[1], received[1]) * size) if wire.has_replicas else ()
    return Op(
        kind=kind,
        key=before.key,
        rank=before.rank,
        deps=(before.name,),
        bytes=max(sum(sent), sum(received)) * size,
        axis_bytes=by_axis,
        memory=sum(received) * size,
        items=bucket.matrices,
        group=wire.group,
    )


def fill_buckets(
    program: Program,
    *,
    sizes: Sequence[int],
    sole_holders: Sequence[int | None],
    num_owners: int,
    chunk_bytes: int,
    key_prefix: str = "",
) -> Program:
    """Merge ops of single matrices, in their order, into one op per bucket.

    A bucket is closed when it has at least one matrix for each owner and the next one would take it above
    ``num_owners * chunk_bytes``: what an *average* owner holds of a bucket is bounded by ``chunk_bytes``, but for
    matrices that are larger. Where all ranks own all matrices, ``num_owners`` is 1, and the bound is that of a bucket.

    Matrices that lie on one rank alone come first, in buckets of their own, with at most ``chunk_bytes`` per rank.

    Args:
        program: Unassigned ops of one matrix each, in the order in which backward finishes the gradients.
        sizes: Bytes of each matrix.
        sole_holders: For each matrix the rank that has all of it, or None.
        num_owners: Number of ranks that share the matrices of a bucket among them.
        chunk_bytes: See above.
        key_prefix: The key of bucket 3 is this and ``"3"``.
    """
    ops = program[UNASSIGNED]
    resident = [op for op in ops if sole_holders[op.items[0]] is not None]
    travelling = [op for op in ops if sole_holders[op.items[0]] is None]
    buckets = _by_rank(resident, sizes, sole_holders, chunk_bytes) + _by_bytes(
        travelling, sizes, num_owners, num_owners * chunk_bytes
    )
    return {UNASSIGNED: [_merge(members, f"{key_prefix}{number}") for number, members in enumerate(buckets)]}


def _by_bytes(ops: Sequence[Op], sizes: Sequence[int], least: int, most_bytes: int) -> list[list[Op]]:
    buckets: list[list[Op]] = []
    filled = 0
    for op in ops:
        size = sizes[op.items[0]]
        if not buckets or (len(buckets[-1]) >= least and filled + size > most_bytes):
            buckets.append([])
            filled = 0
        buckets[-1].append(op)
        filled += size
    return buckets


def _by_rank(
    ops: Sequence[Op], sizes: Sequence[int], sole_holders: Sequence[int | None], chunk_bytes: int
) -> list[list[Op]]:
    """Each rank fills its own sequence of buckets, so that all ranks have work in bucket after bucket."""
    buckets: list[list[Op]] = []
    filled: dict[int | None, tuple[int, int]] = {}
    for op in ops:
        matrix = op.items[0]
        rank = sole_holders[matrix]
        number, size = filled.get(rank, (0, 0))
        if size and size + sizes[matrix] > chunk_bytes:
            number, size = number + 1, 0
        filled[rank] = (number, size + sizes[matrix])
        if number == len(buckets):
            buckets.append([])
        buckets[number].append(op)
    return buckets


def _merge(ops: Sequence[Op], key: str) -> Op:
    items = tuple(item for op in ops for item in op.items)
    return replace(ops[0], key=key, cost=sum(op.cost for op in ops), items=items)
