"""Refuse broken programs, by name of the op, before any rank runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest

from lightning_muon.schedule.graph import NAMED, Groups, build_graph, where
from lightning_muon.schedule.muon import MuonPlan
from lightning_muon.schedule.program import (
    COMPUTE,
    EARLY_KINDS,
    EVERY_KEY,
    IN_BACKWARD,
    IN_STEP,
    STEP_KINDS,
    TRANSFER,
    Condition,
    Facts,
    Op,
    OpKind,
    Program,
    branch,
)
from lightning_muon.schedule.traffic import Owners

_LANES = (COMPUTE, TRANSFER)
_PHASES = (IN_BACKWARD, IN_STEP)


def validate(program: Program) -> None:
    """Check that a program, with all ranks of every group, can run, whatever the ops take.

    Each op is on the rank that lists it, on a known lane, with sizes of at least 0, and has a name of its own; ``deps``
    exist; results are used; the ranks of a communication all have it once; those of one group come in the same order on
    all of its ranks; nothing waits for itself in the end. Otherwise a ``ValueError`` (:class:`~.graph.DeadlockError` if
    ops wait for each other) names the op and its rank.
    """
    for rank, ops in program.items():
        _check_rank(rank, ops)
    # Raises for unknown dependencies, equal names and wrong groups.
    graph = build_graph(program)
    _check_order(program)
    # Raises for ops that can never begin, such as a communication that a rank lacks.
    deque(graph.order(), maxlen=0)


def _check_rank(rank: int, ops: list[Op]) -> None:
    used = {name for op in ops for name in op.deps}
    phase = 0
    for op in ops:
        if op.rank != rank:
            raise ValueError(f"{where(op)} is in the list of rank {rank}")
        if op.lane not in _LANES:
            raise ValueError(f"{where(op)} is on the lane {op.lane!r}; lanes are {_LANES}")
        if op.phase not in _PHASES or _PHASES.index(op.phase) < phase:
            raise ValueError(
                f"{where(op)} runs {op.phase!r}, behind what runs {_PHASES[phase]!r}; phases follow each other as "
                f"{_PHASES}"
            )
        phase = _PHASES.index(op.phase)
        if min(op.cost, op.bytes, op.memory, *op.axis_bytes) < 0:
            raise ValueError(
                f"{where(op)} has cost={op.cost}, bytes={op.bytes}, axis_bytes={op.axis_bytes}, memory={op.memory}; "
                "all of them must be at least 0"
            )
        if op.memory and op.name not in used:
            raise ValueError(
                f"{where(op)} has a result of {op.memory} bytes that nothing uses; let the op that uses it depend on it"
            )


def _check_order(program: Program) -> None:
    """Communications of one group have one order and equal conditions."""
    groups = Groups()
    expected: dict[frozenset[int], tuple[int, list[str]]] = {}
    for rank, ops in program.items():
        found: dict[frozenset[int], list[str]] = {}
        for op in ops:
            if len(op.group) > 1:
                conditions = [*(f" when {name}" for name in op.when), *(f" unless {name}" for name in op.unless)]
                found.setdefault(groups.of(op), []).append("".join([op.name, *conditions]))
        for group, names in found.items():
            first, wanted = expected.setdefault(group, (rank, names))
            for mine, theirs in zip_longest(names, wanted):
                if mine != theirs:
                    raise ValueError(
                        f"rank {rank} has {mine} where rank {first} has {theirs}: communications of one group must "
                        "come in the same order on all ranks"
                    )


def check_step(program: Program, plans: Sequence[MuonPlan], *, is_whole: bool = True) -> None:
    """Check a program of :func:`~.step.step_program` with :func:`validate`, each branch with :func:`validate_step`.

    Takes time in the number of ops. Where the program lists the ops of some ranks only (not ``is_whole``),
    communications count as what a rank does alone: that all ranks have them in the same order is what equal
    :func:`~.step.fingerprint` say. No two of ``plans`` have ops of one key.
    """
    validate(program if is_whole else {rank: [_alone(op, rank) for op in ops] for rank, ops in program.items()})
    plan_of = {op.key: plan for plan in plans for ops in plan.program.values() for op in ops}
    for facts in _scenarios(program):
        of_plan: dict[int, Program] = {id(plan): {} for plan in plans}
        for ops in branch(program, facts).values():
            _check_changes(ops, is_deferred=Condition.DEFERRED in facts)
            for op in ops:
                if op.kind in (*STEP_KINDS, *EARLY_KINDS) and op.key in plan_of:
                    of_plan[id(plan_of[op.key])].setdefault(op.rank, []).append(op)
        for plan in plans:
            validate_step(of_plan[id(plan)], plan.owners, is_whole=is_whole)


def _alone(op: Op, rank: int) -> Op:
    return replace(op, group=(), rank=rank) if op.group or op.rank != rank else op


def _scenarios(program: Program) -> Iterator[Facts]:
    """The branches that differ in what runs. Those with ops that are run in vain have nothing else."""
    found = {name for ops in program.values() for op in ops for name in (*op.when, *op.unless)}
    unknown = sorted(found - {Condition.GRADIENTS, Condition.SENT, Condition.VALID, Condition.DEFERRED})
    if unknown:
        raise ValueError(f"an op depends on the condition {unknown[0]!r}, which no step knows")
    for sent in ([], [Condition.SENT, Condition.VALID]) if Condition.SENT in found else ([],):
        for deferred in ([], [Condition.DEFERRED]) if Condition.DEFERRED in found else ([],):
            yield dict.fromkeys([Condition.GRADIENTS, *sent, *deferred], EVERY_KEY)


def _check_changes(ops: Sequence[Op], *, is_deferred: bool) -> None:
    """Nothing changes before the check, and AdamW runs once."""
    is_checked = not is_deferred
    for op in ops:
        is_checked = is_checked or op.kind == OpKind.CHECK
        if op.kind in (OpKind.ADAMW, OpKind.UPDATE) and not is_checked:
            raise ValueError(f"{where(op)} changes parameters before the step has waited for check; put it behind")
    batches = [op.key.partition(" ")[0] for op in ops if op.kind == OpKind.ADAMW]
    if len(set(batches)) != len(batches):
        raise ValueError(f"rank {ops[0].rank} has the {OpKind.ADAMW} ops {batches}; each must run once in a step")


def validate_step(program: Program, owners: Sequence[Owners], *, is_whole: bool = True) -> None:
    """Check that a program orthogonalizes each matrix once on each of its owners, and that nothing is skipped.

    A matrix is in one bucket, and in the Newton-Schulz of this bucket on its owners only. On each rank a bucket has one
    momentum, at most one gather, one Newton-Schulz, at most one scatter, and one update, each of which depends on the
    one before; no result is used by two buckets. Ops of other kinds may be anywhere. Where the program does not have
    all ranks (not ``is_whole``), the owners among the others are taken to do their part.
    """
    bucket_of = _buckets(program, len(owners))
    found: list[list[int]] = [[] for _ in owners]
    for rank, ops in program.items():
        _check_step_of_rank(rank, ops)
        for op in ops:
            for matrix in op.items if op.kind == OpKind.NEWTON_SCHULZ else ():
                if bucket_of.get(matrix) != op.key:
                    raise ValueError(f"{where(op)} works on matrix {matrix}, which is not in bucket {op.key}")
                found[matrix].append(rank)
    for matrix, (ranks, wanted) in enumerate(zip(found, owners, strict=True)):
        expected = sorted(wanted if is_whole else program.keys() & wanted)
        if sorted(ranks) != expected or not wanted:
            raise ValueError(
                f"newton_schulz[{bucket_of[matrix]}] has matrix {matrix} on the ranks {_some(ranks)}, and its owners "
                f"are {_some(expected)}; each matrix needs an owner, and each owner has it once"
            )


def _buckets(program: Program, num_matrices: int) -> dict[int, str]:
    """Key of the bucket of each matrix."""
    ops_of: dict[str, Op] = {}
    for ops in program.values():
        for op in ops:
            if op.kind in STEP_KINDS and op.kind != OpKind.NEWTON_SCHULZ:
                first = ops_of.setdefault(op.key, op)
                if op.items != first.items:
                    raise ValueError(
                        f"{where(op)} works on the matrices {_some(op.items)} and {where(first)} on "
                        f"{_some(first.items)}; all ops of a bucket but Newton-Schulz have all matrices of the bucket"
                    )
    bucket_of: dict[int, str] = {}
    for key, op in ops_of.items():
        for matrix in op.items:
            if not 0 <= matrix < num_matrices:
                raise ValueError(f"{where(op)} works on matrix {matrix}, but there are {num_matrices} matrices")
            if matrix in bucket_of:
                raise ValueError(
                    f"{where(op)} works on matrix {matrix}, which bucket {bucket_of[matrix]} has too; a matrix is in "
                    "one bucket, once"
                )
            bucket_of[matrix] = key
    for matrix in range(num_matrices):
        if matrix not in bucket_of:
            raise ValueError(f"matrix {matrix} is in no bucket, so no op of any rank updates it")
    return bucket_of


# Which kind works on the result of an op, that of its own bucket only. (Other dependencies are those of buffers.)
_USER_OF = {
    OpKind.MOMENTUM: OpKind.NEWTON_SCHULZ,
    OpKind.GATHER: OpKind.NEWTON_SCHULZ,
    OpKind.NEWTON_SCHULZ: OpKind.UPDATE,
    OpKind.SCATTER: OpKind.UPDATE,
}


def _check_step_of_rank(rank: int, ops: Sequence[Op]) -> None:
    """One op of each kind per bucket, which depends on the one before, and on no result of another bucket."""
    buckets: dict[str, dict[str, Op]] = {}
    # Name of an op -> its key, and the kind that works on its result.
    users: dict[str, tuple[str, str]] = {}
    for op in ops:
        kind = EARLY_KINDS.get(op.kind, op.kind)
        if kind in STEP_KINDS:
            if buckets.setdefault(op.key, {}).setdefault(kind, op) is not op:
                raise ValueError(f"{where(op)} is there twice; a bucket has one op of each kind")
            users[op.name] = (op.key, _USER_OF.get(kind, ""))
    for key, bucket in buckets.items():
        for kind in STEP_KINDS:
            if kind not in bucket and kind not in (OpKind.GATHER, OpKind.SCATTER):
                other = next(iter(bucket.values()))
                raise ValueError(f"rank {rank} has {other.name} but no {kind}[{key}]; each bucket needs one")
        chain = [bucket[kind] for kind in STEP_KINDS if kind in bucket]
        for before, op in pairwise(chain):
            if before.name not in op.deps:
                raise ValueError(
                    f"{where(op)} does not depend on {before.name}, whose result it works on; add it to its deps"
                )
        for op in chain:
            for name in op.deps:
                owner, user = users.get(name, (key, ""))
                if owner != key and op.kind == user:
                    raise ValueError(
                        f"{where(op)} depends on {name}, whose result is for {op.kind}[{owner}] alone; a result is "
                        "used by its own bucket, once"
                    )


def _some(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - NAMED} more" if len(numbers) > NAMED else ""
    return f"{list(numbers[:NAMED])}{more}"
