"""Turn "who runs Newton-Schulz for what" into the ops of a step: momentum, gather, Newton-Schulz, scatter, update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lightning_muon.schedule.counts import Owners, RankTraffic, count_elements
from lightning_muon.schedule.holdings import Holdings
from lightning_muon.schedule.kinds import GATHER, MOMENTUM, NEWTON_SCHULZ, SCATTER, UPDATE
from lightning_muon.schedule.program import Op, Program

# Gradients, momenta and weights are counted as float32.
STATE_ITEMSIZE = 4


@dataclass(frozen=True)
class _Chunk:
    """A chunk with what each rank sends and receives, in elements."""

    matrices: tuple[int, ...]
    is_resident: bool
    traffic: list[RankTraffic]


def insert_communication(
    program: Program, where: Holdings, *, itemsize: int, matrices: Sequence[tuple[int, ...]]
) -> Program:
    """Surround each Newton-Schulz op by momentum, gather, scatter and update.

    Every rank gets the ops of every chunk, also where it has nothing to do: a collective needs all ranks. Matrices that
    lie on one rank alone stay there, so their chunks have no gather and no scatter. A plan none of whose gathers moves
    anything (replicated parameters) has no gathers, and one none of whose scatters does (every rank owns everything)
    has no scatters.

    Args:
        program: The Newton-Schulz ops of each rank, one per chunk.
        where: Which rank holds what.
        itemsize: Bytes of an element on the wire.
        matrices: All matrices of each chunk.
    """
    owners = owners_of(program, len(where.specs))
    holders = where.sole_holders()
    chunks = [
        _Chunk(
            matrices=items,
            is_resident=all(owners[item] == (holders[item],) for item in items),
            traffic=count_elements({item: owners[item] for item in items}, where),
        )
        for items in matrices
    ]
    everything = [each for chunk in chunks if not chunk.is_resident for each in chunk.traffic]
    wire = _Wire(
        group=tuple(range(where.num_ranks)),
        itemsize=itemsize,
        has_replicas=len(set(where.replica_of)) > 1,
        gathers=any(any(each.gather_received) for each in everything),
        scatters=any(any(each.scatter_received) for each in everything),
    )
    return {
        rank: [
            op for newton_schulz, chunk in zip(ops, chunks, strict=True) for op in _ops_of(newton_schulz, chunk, wire)
        ]
        for rank, ops in program.items()
    }


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


def _ops_of(newton_schulz: Op, chunk: _Chunk, wire: _Wire) -> list[Op]:
    """The ops of one rank and chunk in their order, each of which needs the one before."""
    count, itemsize = chunk.traffic[newton_schulz.rank], wire.itemsize
    packed = sum(count.gather_sent) * itemsize
    to_send = sum(count.scatter_sent) * itemsize
    # momentum: the gradient is read, the momentum is read and written, and the pieces for the owners are written.
    # newton_schulz: what came is read and the wholes are written, and from the updates what goes is read and written.
    # update: the update is read, the weight is read and written.
    ops = [
        replace(
            newton_schulz,
            kind=MOMENTUM,
            cost=0,
            items=chunk.matrices,
            bytes=3 * STATE_ITEMSIZE * count.held + packed,
            memory=packed,
        )
    ]
    if wire.gathers and not chunk.is_resident:
        ops.append(_transfer(GATHER, ops[0], wire, sent=count.gather_sent, received=count.gather_received))
    ops.append(replace(newton_schulz, bytes=2 * itemsize * count.owned + 2 * to_send, memory=to_send))
    if wire.scatters and not chunk.is_resident:
        ops.append(_transfer(SCATTER, ops[0], wire, sent=count.scatter_sent, received=count.scatter_received))
    update_bytes = (itemsize + 2 * STATE_ITEMSIZE) * count.held
    ops.append(replace(ops[0], kind=UPDATE, bytes=update_bytes, memory=0))
    return [ops[0], *(replace(op, deps=(before.name,)) for before, op in pairwise(ops))]


def _transfer(kind: str, like: Op, wire: _Wire, *, sent: tuple[int, int], received: tuple[int, int]) -> Op:
    by_axis = tuple(max(pair) * wire.itemsize for pair in zip(sent, received, strict=True))
    return replace(
        like,
        kind=kind,
        bytes=max(sum(sent), sum(received)) * wire.itemsize,
        axis_bytes=by_axis if wire.has_replicas else (),
        memory=sum(received) * wire.itemsize,
        group=wire.group,
    )
