"""Checks of programs before any rank runs them; errors name the op."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from lightning_muon.schedule.graph import NAMED, build_graph, where
from lightning_muon.schedule.muon import MuonPlan
from lightning_muon.schedule.program import (
    EVERY_KEY,
    STEP_KINDS,
    Condition,
    Facts,
    Op,
    OpKind,
    Program,
    branch,
)


def validate(program: Program) -> None:
    """Check that a program, with all ranks of every group, can run; a ``ValueError`` names the op and its rank.

    Names must be unique, ``deps`` exist, results be used, and no op wait forever: all ranks of a communication must
    reach it, in one order.
    """
    for ops in program.values():
        used = {name for op in ops for name in op.deps}
        for op in ops:
            if op.memory and op.name not in used:
                raise ValueError(f"{where(op)} has a result of {op.memory} bytes that nothing uses")
    # Raises for unknown dependencies, equal names, wrong groups, and ops that can never begin.
    deque(build_graph(program).order(), maxlen=0)


def check_step(program: Program, plans: Sequence[MuonPlan], *, is_whole: bool = True) -> None:
    """Check that a program of :func:`~.step.step_program` can run, and that each branch does what the plans say, once.

    If only some ranks are listed (not ``is_whole``), communications count as ops of single ranks: their order is
    compared between ranks elsewhere.
    """
    if is_whole:
        validate(program)
    else:
        validate({rank: [replace(op, group=(), rank=rank) for op in ops] for rank, ops in program.items()})
    for plan in plans:
        _check_owners(plan)
    for facts in _scenarios(program):
        planned = {(op.rank, op.name): op for plan in plans for ops in plan.program.values() for op in ops}
        for ops in branch(program, facts).values():
            _check_changes(ops, is_deferred=Condition.DEFERRED in facts)
            _take_off(ops, planned)
        for op in planned.values():
            raise ValueError(f"{where(op)} is in the plan and not in the step; each bucket needs one")


def _scenarios(program: Program) -> Iterator[Facts]:
    """Yield the facts of the branches that differ in their ops."""
    found = {name for ops in program.values() for op in ops for name in (*op.when, *op.unless)}
    for deferred in ([], [Condition.DEFERRED]) if Condition.DEFERRED in found else ([],):
        yield dict.fromkeys([Condition.GRADIENTS, *deferred], EVERY_KEY)


def _check_changes(ops: Sequence[Op], *, is_deferred: bool) -> None:
    """Check that no op changes parameters before the check, and that AdamW runs once."""
    is_checked = not is_deferred
    for op in ops:
        is_checked = is_checked or op.kind == OpKind.CHECK
        if op.kind in (OpKind.ADAMW, OpKind.UPDATE) and not is_checked:
            raise ValueError(f"{where(op)} changes parameters before the step has waited for check; put it behind")
    batches = [op.key.partition(" ")[0] for op in ops if op.kind == OpKind.ADAMW]
    if len(set(batches)) != len(batches):
        raise ValueError(f"rank {ops[0].rank} has the {OpKind.ADAMW} ops {batches}; each must run once in a step")


def _check_owners(plan: MuonPlan) -> None:
    """Check that each matrix is in one bucket, and is orthogonalized once on each of its owners."""
    if sorted(chain.from_iterable(plan.buckets)) != list(range(len(plan.owners))):
        raise ValueError(f"the buckets {plan.buckets[:NAMED]} must have each of {len(plan.owners)} matrices once")
    ops = [op for listed in plan.program.values() for op in listed if op.kind == OpKind.NEWTON_SCHULZ]
    found = Counter((matrix, op.rank) for op in ops for matrix in op.items)
    wanted = Counter((matrix, rank) for matrix, ranks in enumerate(plan.owners) for rank in ranks)
    for matrix, rank in (found - wanted) + (wanted - found):
        if rank in plan.program:
            raise ValueError(
                f"rank {rank} has matrix {matrix} in {found[matrix, rank]} newton_schulz ops; each of its owners must "
                "have it in one, and other ranks in none"
            )


def _take_off(ops: Sequence[Op], planned: dict[tuple[int, str], Op]) -> None:
    """Remove the ops of a rank from the planned ones."""
    for op in ops:
        if op.kind not in STEP_KINDS:
            continue
        plan = planned.pop((op.rank, op.name), None)
        if plan is None:
            raise ValueError(f"{where(op)} is not in the plan, or is there twice; a bucket has one op of each kind")
        if op.items != plan.items:
            raise ValueError(f"{where(op)} works on the matrices {op.items[:NAMED]}, planned are {plan.items[:NAMED]}")
        for name in set(plan.deps).difference(op.deps):
            raise ValueError(f"{where(op)} does not depend on {name}, whose result it works on")
