"""Refuse broken programs, by name of the op, before any rank runs them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from lightning_muon.schedule.graph import NAMED, build_graph, where
from lightning_muon.schedule.muon import MuonPlan
from lightning_muon.schedule.program import (
    EARLY_KINDS,
    EVERY_KEY,
    STEP_KINDS,
    Condition,
    Facts,
    Op,
    OpKind,
    Program,
    branch,
)
from lightning_muon.schedule.traffic import Owners


def validate(program: Program) -> None:
    """Check that a program, with all ranks of every group, can run; a ``ValueError`` names the op and its rank.

    Names are unique, ``deps`` exist, results are used, and nothing waits for ever: all ranks of a communication come to
    it, in one order.
    """
    for ops in program.values():
        used = {name for op in ops for name in op.deps}
        for op in ops:
            if op.memory and op.name not in used:
                raise ValueError(f"{where(op)} has a result of {op.memory} bytes that nothing uses")
    # Raises for unknown dependencies, equal names, wrong groups, and ops that can never begin.
    deque(build_graph(program).order(), maxlen=0)


def check_step(program: Program, plans: Sequence[MuonPlan], *, is_whole: bool = True) -> None:
    """Check a program of :func:`~.step.step_program` with :func:`validate`, each branch with :func:`validate_step`.

    Where only some ranks are listed (not ``is_whole``), communications count as what a rank does alone: their order is
    compared by :func:`~.step.fingerprint`.
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

    On each rank a bucket has momentum, gather if any, Newton-Schulz, scatter if any, and update, each of which depends
    on the one before. Where only some ranks are listed (not ``is_whole``), the others are taken to do their part.
    """
    items_of: dict[str, tuple[int, ...]] = {}
    found: Counter[tuple[int, int]] = Counter()
    for rank, ops in program.items():
        for key, bucket in _buckets(rank, ops).items():
            items = items_of.setdefault(key, bucket[OpKind.MOMENTUM].items)
            for kind, op in bucket.items():
                is_share = kind == OpKind.NEWTON_SCHULZ and set(items).issuperset(op.items)
                if op.items != items and not is_share:
                    raise ValueError(
                        f"{where(op)} works on the matrices {op.items[:NAMED]}, its bucket has {items[:NAMED]}"
                    )
            found.update((matrix, rank) for matrix in bucket[OpKind.NEWTON_SCHULZ].items)
    num_buckets = Counter(matrix for items in items_of.values() for matrix in items)
    for matrix in num_buckets.keys() | set(range(len(owners))):
        if num_buckets[matrix] != 1 or matrix >= len(owners):
            raise ValueError(f"matrix {matrix} of {len(owners)} is in {num_buckets[matrix]} buckets; it must be in one")
    listed = [[rank for rank in ranks if is_whole or rank in program] for ranks in owners]
    wanted = Counter((matrix, rank) for matrix, ranks in enumerate(listed) for rank in ranks)
    for matrix, rank in (found - wanted) + (wanted - found):
        raise ValueError(
            f"rank {rank} has matrix {matrix} in {found[matrix, rank]} newton_schulz ops; its owners {listed[matrix]} "
            "must have it in one, and other ranks in none"
        )


def _buckets(rank: int, ops: Sequence[Op]) -> dict[str, dict[str, Op]]:
    """Key -> the op of each kind, those of the backward phase as what they stand for."""
    buckets: dict[str, dict[str, Op]] = {}
    for op in ops:
        kind = EARLY_KINDS.get(op.kind, op.kind)
        if kind in STEP_KINDS and buckets.setdefault(op.key, {}).setdefault(kind, op) is not op:
            raise ValueError(f"{where(op)} is there twice; a bucket has one op of each kind")
    for key, bucket in buckets.items():
        for kind in (OpKind.MOMENTUM, OpKind.NEWTON_SCHULZ, OpKind.UPDATE):
            if kind not in bucket:
                raise ValueError(f"rank {rank} has no {kind}[{key}]; each bucket needs one")
        for before, op in pairwise(bucket[kind] for kind in STEP_KINDS if kind in bucket):
            if before.name not in op.deps:
                raise ValueError(f"{where(op)} does not depend on {before.name}, whose result it works on")
    return buckets
