"""Refuse broken programs, by name of the op, before any rank runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from lightning_muon.schedule.graph import Communications, build_graph, where
from lightning_muon.schedule.memory import peak_memory
from lightning_muon.schedule.muon import MuonPlan
from lightning_muon.schedule.program import (
    ADAMW,
    CHECK,
    COMPUTE,
    DEFERRED,
    EARLY_KINDS,
    EVERY_KEY,
    GATHER,
    GRADIENTS,
    IN_BACKWARD,
    IN_STEP,
    MOMENTUM,
    NEWTON_SCHULZ,
    RECV,
    SCATTER,
    SEND,
    SENT,
    STEP_KINDS,
    TRANSFER,
    UPDATE,
    VALID,
    Facts,
    Op,
    Program,
    branch,
)
from lightning_muon.schedule.traffic import Owners

_LANES = (COMPUTE, TRANSFER)
_PHASES = (IN_BACKWARD, IN_STEP)
_KINDS_OF_MATRICES = (*STEP_KINDS, *EARLY_KINDS)


def validate(program: Program, *, memory_bytes: int | None = None) -> None:
    """Check that a program can run on all ranks, whatever the ops take.

    Each op is on the rank that lists it, on a known lane, with sizes of at least 0, and has a name of its own; ``deps``
    exist; results are used; the ranks of a communication all have it once; those of one group come in the same order on
    all of its ranks, sends from one rank to another in the order of their receives; nothing waits for itself in the
    end; buffers fit.

    Args:
        program: With all ranks of every group.
        memory_bytes: Upper bound for each rank's :func:`~.memory.rank_peaks`.

    Raises:
        ValueError: Names the op and its rank.
        DeadlockError: (a ValueError) Ops wait for each other.
    """
    for rank, ops in program.items():
        _check_rank(rank, ops)
    # Raises for unknown dependencies, equal names and wrong groups.
    graph = build_graph(program)
    _check_members(program)
    _check_collective_order(program)
    _check_pair_order(program)
    deque(graph.order(), maxlen=0)
    if memory_bytes is not None:
        peak = peak_memory(program)
        if peak.bytes > memory_bytes:
            raise ValueError(
                f"{peak.op} of rank {peak.rank} needs {peak.bytes} bytes of buffers, more than "
                f"memory_bytes={memory_bytes}; lower the look-ahead or the bucket size"
            )


def check_step(program: Program, plans: Sequence[MuonPlan], *, is_whole: bool = True) -> None:
    """Check a program with :func:`validate`, and with :func:`validate_step` each of its branches.

    Takes time in the number of ops. Where the program lists the ops of some ranks only, communications count as what a
    rank does alone: that all ranks have them in the same order is what equal :func:`~.step.fingerprint` say.

    Args:
        program: Made of ``plans``, as :func:`~.step.step_program` does it.
        plans: Matrices and owners; no two have ops of one key.
        is_whole: Whether all ranks are there.

    Raises:
        ValueError: Names the op and its rank.
    """
    validate(program if is_whole else {rank: [_alone(op, rank) for op in ops] for rank, ops in program.items()})
    plan_of = {op.key: plan for plan in plans for ops in plan.program.values() for op in ops}
    for facts in _scenarios(program):
        chosen = branch(program, facts)
        of_plan: dict[int, Program] = {id(plan): {} for plan in plans}
        for ops in chosen.values():
            _check_changes(ops, is_deferred="" in facts.get(DEFERRED, ()))
            for op in ops:
                if op.kind in _KINDS_OF_MATRICES and op.key in plan_of:
                    of_plan[id(plan_of[op.key])].setdefault(op.rank, []).append(op)
        for plan in plans:
            validate_step(of_plan[id(plan)], plan.owners, is_whole=is_whole)


def _scenarios(program: Program) -> Iterator[Facts]:
    """The branches that differ in what runs. Those with ops that are run in vain have nothing else."""
    found = {name for ops in program.values() for op in ops for name in (*op.when, *op.unless)}
    unknown = sorted(found - {GRADIENTS, SENT, VALID, DEFERRED})
    if unknown:
        raise ValueError(f"an op depends on the condition {unknown[0]!r}, which no step knows")
    for is_sent in (False, True) if SENT in found else (False,):
        for is_deferred in (False, True) if DEFERRED in found else (False,):
            facts = {GRADIENTS: EVERY_KEY}
            if is_sent:
                facts |= {SENT: EVERY_KEY, VALID: EVERY_KEY}
            yield facts | ({DEFERRED: EVERY_KEY} if is_deferred else {})


def _check_changes(ops: Sequence[Op], *, is_deferred: bool) -> None:
    """Nothing changes before the check, and AdamW runs once."""
    is_checked = not is_deferred
    for op in ops:
        is_checked = is_checked or op.kind == CHECK
        if op.kind in (ADAMW, UPDATE) and not is_checked:
            raise ValueError(f"{where(op)} changes parameters before the step has waited for {CHECK}; put it behind")
    batches = [op.key.partition(" ")[0] for op in ops if op.kind == ADAMW]
    if len(set(batches)) != len(batches):
        raise ValueError(f"rank {ops[0].rank} has the {ADAMW} ops {batches}; each must run once in a step")


def _alone(op: Op, rank: int) -> Op:
    return replace(op, group=(), rank=rank) if op.group or op.rank != rank else op


def _check_rank(rank: int, ops: list[Op]) -> None:
    used = {name for op in ops for name in op.deps}
    phase = 0
    for op in ops:
        if op.rank != rank:
            raise ValueError(f"{op.name} is an op of rank {op.rank} in the list of rank {rank}; assign it first")
        if op.lane not in _LANES:
            raise ValueError(f"{op.name} of rank {rank} is on the lane {op.lane!r}; lanes are {_LANES}")
        if op.phase not in _PHASES or _PHASES.index(op.phase) < phase:
            raise ValueError(
                f"{op.name} of rank {rank} runs {op.phase!r}, behind what runs {_PHASES[phase]!r}; phases follow each "
                f"other as {_PHASES}"
            )
        phase = _PHASES.index(op.phase)
        if op.cost < 0 or op.bytes < 0 or op.memory < 0 or (op.axis_bytes and min(op.axis_bytes) < 0):
            raise ValueError(
                f"{op.name} of rank {rank} has cost={op.cost}, bytes={op.bytes}, axis_bytes={op.axis_bytes}, "
                f"memory={op.memory}; all of them must be at least 0"
            )
        if op.memory and op.name not in used:
            raise ValueError(
                f"{op.name} of rank {rank} has a result of {op.memory} bytes that nothing uses; let the op that "
                "uses it depend on it"
            )


def _check_members(program: Program) -> None:
    matches = Communications()
    present: dict[tuple[str, str, int], list[Op]] = {}
    for ops in program.values():
        for op in ops:
            key = matches.key(op)
            if key is not None:
                present.setdefault(key, []).append(op)
    for members in present.values():
        first = members[0]
        if len(members) == len(first.group):
            if first.kind in (SEND, RECV) and members[1].kind == first.kind:
                raise ValueError(
                    f"ranks {first.rank} and {members[1].rank} both have {first.name}; one must be the other kind"
                )
            continue
        absent = sorted(set(first.group) - {op.rank for op in members})[0]
        other = next((op for op in program.get(absent, ()) if op.name == _partner(first)), None)
        found = f"has it with the ranks {other.group[:8]}" if other is not None else f"has no {_partner(first)}"
        raise ValueError(
            f"{first.name} of rank {first.rank} is a communication of ranks {first.group[:8]}, but rank "
            f"{absent} {found}"
        )


def _partner(op: Op) -> str:
    return f"{ {SEND: RECV, RECV: SEND}.get(op.kind, op.kind) }[{op.key}]"


def _check_collective_order(program: Program) -> None:
    matches = Communications()
    expected: dict[int, tuple[int, list[str]]] = {}
    for rank, ops in program.items():
        found: dict[int, list[str]] = {}
        for op in ops:
            if len(op.group) > 1 and op.kind not in (SEND, RECV):
                found.setdefault(matches.group_number(op), []).append(_with_conditions(op))
        for group, names in found.items():
            first, wanted = expected.setdefault(group, (rank, names))
            for mine, theirs in zip_longest(names, wanted):
                if mine != theirs:
                    raise ValueError(
                        f"rank {rank} has {mine} where rank {first} has {theirs}: communications of one group must "
                        "come in the same order on all of its ranks"
                    )


def _with_conditions(op: Op) -> str:
    """Equal for the ops of one communication, which must run on all ranks or on none."""
    unless = f" unless {' and '.join(op.unless)}" if op.unless else ""
    return f"{op.name}{' when ' + ' and '.join(op.when) if op.when else ''}{unless}"


def _check_pair_order(program: Program) -> None:
    keys: dict[tuple[str, int, int], list[str]] = {}
    for rank, ops in program.items():
        for op in ops:
            if op.kind in (SEND, RECV) and len(op.group) == 2:
                peer = op.group[0] if op.group[1] == rank else op.group[1]
                source, target = (rank, peer) if op.kind == SEND else (peer, rank)
                keys.setdefault((op.kind, source, target), []).append(op.key)
    for (kind, source, target), sent in keys.items():
        received = keys.get((RECV, source, target), [])
        if kind == SEND and sent != received:
            place = next(index for index, (one, other) in enumerate(zip(sent, received, strict=True)) if one != other)
            raise ValueError(
                f"rank {source} sends send[{sent[place]}] where rank {target} receives recv[{received[place]}]: "
                "messages between two ranks arrive in the order in which they are sent"
            )


_MAY_BE_ABSENT = (GATHER, SCATTER)
# Which kind works on the result of an op, that of its own bucket only. (Other dependencies are those of buffers.)
_HANDED_TO = {MOMENTUM: (NEWTON_SCHULZ,), GATHER: (NEWTON_SCHULZ,), NEWTON_SCHULZ: (UPDATE,), SCATTER: (UPDATE,)}


def validate_step(program: Program, owners: Sequence[Owners], *, is_whole: bool = True) -> None:
    """Check that a program orthogonalizes each matrix once on each of its owners, and that nothing is skipped.

    A matrix is in one bucket, and in the Newton-Schulz of this bucket on its owners only. On each rank a bucket has one
    momentum, at most one gather, one Newton-Schulz, at most one scatter, and one update, each of which depends on the
    one before; no result is used by two buckets.

    Args:
        program: With all ranks of the exchange group; ops of other kinds may be anywhere.
        owners: For each matrix the ranks that own it, ascending.
        is_whole: Whether the program has all ranks; otherwise other owners are taken to do their part.

    Raises:
        ValueError: Names the op and its rank.
    """
    bucket_of = _buckets(program, len(owners))
    for rank, ops in program.items():
        _check_step_of_rank(rank, ops)
    _check_owners(program, owners, bucket_of, is_whole=is_whole)


def _buckets(program: Program, num_matrices: int) -> list[str]:
    """Key of the bucket of each matrix."""
    items_of: dict[str, tuple[Op, tuple[int, ...]]] = {}
    for ops in program.values():
        for op in ops:
            if op.kind in STEP_KINDS and op.kind != NEWTON_SCHULZ:
                first, items = items_of.setdefault(op.key, (op, op.items))
                # Ranks share the tuples of a plan, so this is quick.
                if op.items is not items and op.items != items:
                    raise ValueError(
                        f"{where(op)} works on the matrices {_some(op.items)} and {where(first)} on {_some(items)}; "
                        "all ops of a bucket but Newton-Schulz have all matrices of the bucket"
                    )
    bucket_of: list[str | None] = [None] * num_matrices
    for key, (op, items) in items_of.items():
        for matrix in items:
            if not 0 <= matrix < num_matrices:
                raise ValueError(f"{where(op)} works on matrix {matrix}, but there are {num_matrices} matrices")
            if bucket_of[matrix] is not None:
                raise ValueError(
                    f"{where(op)} works on matrix {matrix}, which bucket {bucket_of[matrix]} has too; a matrix is in "
                    "one bucket, once"
                )
            bucket_of[matrix] = key
    if None in bucket_of:
        raise ValueError(f"matrix {bucket_of.index(None)} is in no bucket, so no op of any rank updates it")
    return [key for key in bucket_of if key is not None]


def _check_step_of_rank(rank: int, ops: Sequence[Op]) -> None:
    """One op of each kind per bucket, each behind the one before, and nobody else's."""
    buckets: dict[str, dict[str, Op]] = {}
    for op in ops:
        kind = EARLY_KINDS.get(op.kind, op.kind)
        if kind in STEP_KINDS and buckets.setdefault(op.key, {}).setdefault(kind, op) is not op:
            raise ValueError(f"{op.name} of rank {rank} is there twice; a bucket has one op of each kind")
    results = {
        op.name: (kind, key) for key, bucket in buckets.items() for kind, op in bucket.items() if kind in _HANDED_TO
    }
    for key, bucket in buckets.items():
        before: Op | None = None
        for kind in STEP_KINDS:
            op = bucket.get(kind)
            if op is not None:
                _check_step_deps(op, before, results)
                before = op
            elif kind not in _MAY_BE_ABSENT:
                other = next(iter(bucket.values()))
                raise ValueError(f"rank {rank} has {other.name} but no {kind}[{key}]; each bucket needs one")


def _check_step_deps(op: Op, before: Op | None, results: Mapping[str, tuple[str, str]]) -> None:
    """The op waits for the one before it in its bucket, and uses no result of other buckets.

    Args:
        op: Of a bucket.
        before: The op before it in the bucket.
        results: Name of an op -> its kind and key.
    """
    if before is not None and before.name not in op.deps:
        raise ValueError(f"{where(op)} does not depend on {before.name}, whose result it works on; add it to its deps")
    for name in op.deps:
        kind, key = results.get(name, ("", op.key))
        if key != op.key and op.kind in _HANDED_TO[kind]:
            raise ValueError(
                f"{where(op)} depends on {name}, whose result is for {op.kind}[{key}] alone; a result is used by its "
                "own bucket, once"
            )


def _check_owners(program: Program, owners: Sequence[Owners], bucket_of: Sequence[str], *, is_whole: bool) -> None:
    """Every matrix in one Newton-Schulz on each of its owners, and nowhere else."""
    found: list[Owners] = [()] * len(owners)
    for items, users in _by_items(op for ops in program.values() for op in ops if op.kind == NEWTON_SCHULZ):
        first, ranks = users[0], tuple(sorted(op.rank for op in users))
        for matrix in items:
            if not 0 <= matrix < len(owners) or bucket_of[matrix] != first.key:
                raise ValueError(f"{where(first)} works on matrix {matrix}, which is not in bucket {first.key}")
            found[matrix] = ranks if not found[matrix] else tuple(sorted((*found[matrix], *ranks)))
    for matrix, (ranks, wanted) in enumerate(zip(found, owners, strict=True)):
        if not ranks and not wanted:
            raise ValueError(f"matrix {matrix} has no owner, so newton_schulz[{bucket_of[matrix]}] leaves it out")
        if not is_whole:
            wanted = tuple(rank for rank in wanted if rank in program)
        if ranks is wanted or ranks == wanted:
            continue
        name = f"newton_schulz[{bucket_of[matrix]}]"
        for rank in sorted({*ranks, *wanted}):
            if ranks.count(rank) != wanted.count(rank):
                raise ValueError(
                    f"{name} of rank {rank} has matrix {matrix} {ranks.count(rank)} times, but its owners are the "
                    f"ranks {_some(wanted)}; each owner has it once and no other rank does"
                )


def _by_items(ops: Iterable[Op]) -> Iterable[tuple[tuple[int, ...], list[Op]]]:
    """Ops of one bucket that share a tuple of matrices (all ranks, where every rank owns everything)."""
    users: dict[tuple[int, str], list[Op]] = {}
    for op in ops:
        if op.items:
            users.setdefault((id(op.items), op.key), []).append(op)
    return [(listed[0].items, listed) for listed in users.values()]


def _some(numbers: tuple[int, ...]) -> str:
    return f"{numbers[:8]}" if len(numbers) <= 8 else f"{numbers[:8]} and {len(numbers) - 8} more"
