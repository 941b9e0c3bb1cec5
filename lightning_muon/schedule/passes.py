"""Passes over finished programs: the order of issue within a bound of memory, and waiting for a blocked host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_muon.schedule.program import COMPUTE, STEP_KINDS, Op, OpKind, Program


def prefetch(program: Program, look_ahead: int, memory_bytes: int | None = None) -> Program:
    """Let transfers of other buckets run while a rank computes.

    ``program`` has for each rank the ops of its buckets in canonical order, and any number of ``adamw`` ops. Momentum
    and gather of the first ``look_ahead`` buckets are issued first, then AdamW. After that, for each bucket k:
    Newton-Schulz and scatter of k, the update of an earlier bucket, momentum and gather of k + look_ahead. With 0 the
    program is left as it is: serial. With 1 only AdamW and updates overlap with transfers, since the gather of k + 1
    queues behind the scatter of k; 2 is the least that lets a gather run beside Newton-Schulz.

    There are buffers for ``look_ahead`` gathers and for s = :func:`scatter_buffers_for` scatters, so momentum k waits
    for Newton-Schulz k - look_ahead, and Newton-Schulz k for update k - s; the update behind scatter k is that of
    k - s + 1. "k - 1" is the bucket before in the list, whatever its key.

    Where the buffers of a rank (see :func:`peak_memory`) exceed ``memory_bytes``, ``look_ahead`` is lowered on
    all ranks alike until they fit.
    """
    while True:
        issued = program
        if look_ahead:
            issued = {rank: _issue_ahead(ops, look_ahead) for rank, ops in program.items()}
        if memory_bytes is None:
            return issued
        peak = peak_memory(issued)
        if peak.bytes <= memory_bytes:
            return issued
        if look_ahead <= 1:
            raise ValueError(
                f"rank {peak.rank} needs {peak.bytes} bytes of buffers at {peak.op} with look_ahead={look_ahead}, but "
                f"memory_bytes is {memory_bytes}; raise it or lower chunk_bytes"
            )
        look_ahead -= 1


def scatter_buffers_for(look_ahead: int) -> int:
    """Scatter buffers that go with a look-ahead: with fewer, all ranks wait for the slowest owner of a bucket."""
    return max(2, look_ahead)


def _issue_ahead(ops: Sequence[Op], look_ahead: int) -> list[Op]:
    adamw: list[Op] = []
    by_key: dict[str, dict[str, Op]] = {}
    for op in ops:
        if op.kind == OpKind.ADAMW:
            adamw.append(op)
        elif op.kind in STEP_KINDS:
            by_key.setdefault(op.key, {})[op.kind] = op
        else:
            raise ValueError(f"prefetch does not know where to put {op.name} of rank {op.rank}; add it afterwards")
    buckets = list(by_key.values())
    scatter_buffers = scatter_buffers_for(look_ahead)
    delay = scatter_buffers - 1
    issued: list[Op] = []
    for bucket in buckets[:look_ahead]:
        issued += _present(bucket, OpKind.MOMENTUM, OpKind.GATHER)
    issued += adamw
    for number, bucket in enumerate(buckets):
        issued += _present(bucket, OpKind.NEWTON_SCHULZ, OpKind.SCATTER)
        if number >= delay:
            issued += _present(buckets[number - delay], OpKind.UPDATE)
        if number + look_ahead < len(buckets):
            issued += _present(buckets[number + look_ahead], OpKind.MOMENTUM, OpKind.GATHER)
    for bucket in buckets[-delay:]:
        issued += _present(bucket, OpKind.UPDATE)
    frees = _buffer_deps(buckets, OpKind.MOMENTUM, OpKind.NEWTON_SCHULZ, look_ahead)
    frees |= _buffer_deps(buckets, OpKind.NEWTON_SCHULZ, OpKind.UPDATE, scatter_buffers)
    return [replace(op, deps=(*op.deps, frees[op.name])) if op.name in frees else op for op in issued]


def _buffer_deps(buckets: Sequence[Mapping[str, Op]], kind: str, frees: str, distance: int) -> dict[str, str]:
    """Name of an op that fills a buffer -> name of the op that has to have emptied it."""
    return {
        later[kind].name: earlier[frees].name
        for earlier, later in zip(buckets, buckets[distance:], strict=False)
        if kind in later and frees in earlier
    }


def _present(bucket: Mapping[str, Op], *kinds: str) -> list[Op]:
    return [bucket[kind] for kind in kinds if kind in bucket]


def host_order(program: Program) -> Program:
    """Make each transfer wait for the last compute op before it in the list.

    For a runtime whose host thread is busy while it computes (CPU), so that it cannot start a transfer in between.
    """
    ordered: Program = {}
    for rank, ops in program.items():
        last: str | None = None
        ordered[rank] = []
        for op in ops:
            if op.lane == COMPUTE:
                last = op.name
            elif last is not None and last not in op.deps:
                op = replace(op, deps=(*op.deps, last))
            ordered[rank].append(op)
    return ordered


@dataclass(frozen=True)
class Peak:
    """Most bytes of a rank, and the op at whose start they may be reached."""

    bytes: int
    rank: int
    op: str


def peak_memory(program: Program) -> Peak:
    """Upper bound, on the rank that needs most, of the bytes of results that are alive at one time.

    A result lives from the start of its op to the end of its last user (to the end of the program without one). It
    counts at the start of another op unless it must come later, or all of its users must have ended before. Lanes run
    in list order. No timing can bring more together, so a simulation never shows more than this.
    """
    with_result = {op.name for ops in program.values() for op in ops if op.memory}
    # Ranks run the same ops with different sizes, so what may be alive together is found once for all of them.
    known: dict[object, list[tuple[int, list[int]]]] = {}
    most = Peak(0, 0, "")
    for rank, ops in program.items():
        structure = tuple((op.name, op.lane, op.deps) for op in ops)
        if structure not in known:
            known[structure] = list(_alive_together(ops, with_result))
        for index, alive in known[structure]:
            total = sum(ops[other].memory for other in alive)
            if total > most.bytes:
                most = Peak(total, rank, ops[index].name)
    return most


def _alive_together(ops: Sequence[Op], with_result: set[str]) -> Iterator[tuple[int, list[int]]]:
    """For each op with a result: the ops whose results may be alive when it starts, itself among them."""
    ancestors, descendants, users = _relations(ops)
    results = sum(1 << index for index, op in enumerate(ops) if op.name in with_result)
    not_dead = {op.lane: results for op in ops}
    for index in _bits(results):
        lane = ops[index].lane
        alive: list[int] = []
        for other in _bits(not_dead[lane] & ~descendants[index]):
            if users[other] and not users[other] & ~ancestors[index]:
                # Dead for the later ops of this lane too: they have the same ancestors and more.
                not_dead[lane] &= ~(1 << other)
            else:
                alive.append(other)
        yield index, alive


def _relations(ops: Sequence[Op]) -> tuple[list[int], list[int], list[int]]:
    """Bit sets of the ops that must end before each op, of those that must start after it, and of its direct users."""
    place = {op.name: index for index, op in enumerate(ops)}
    ancestors, descendants, users = ([0] * len(ops) for _ in range(3))
    before: list[list[int]] = []
    last: dict[str, int] = {}
    for index, op in enumerate(ops):
        used = [place[name] for name in op.deps if name in place]
        for other in used:
            users[other] |= 1 << index
        # Leaving out what is listed later can only raise the bound.
        needs = [other for other in used if other < index]
        if op.lane in last:
            needs.append(last[op.lane])
        last[op.lane] = index
        before.append(needs)
        for other in needs:
            ancestors[index] |= ancestors[other] | 1 << other
    for index in range(len(ops) - 1, -1, -1):
        for other in before[index]:
            descendants[other] |= descendants[index] | 1 << index
    return ancestors, descendants, users


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
