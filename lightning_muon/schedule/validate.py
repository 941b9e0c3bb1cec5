"""Checks of programs before any rank runs them; errors name the op."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from lightning_muon.schedule.graph import NAMED, build_graph, where
from lightning_muon.schedule.muon import MuonPlan
from lightning_muon.schedule.program import (
    STEP_KINDS,
    Op,
    OpKind,
    Program,
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
    """Check that a program of :func:`~.step.prefetch` can run, and that it does what the plans say, once.

    If only some ranks are listed (not ``is_whole``), communications count as ops of single ranks: their order is
    compared between ranks elsewhere.
    """
    if is_whole:
        validate(program)
    else:
        validate({rank: [replace(op, group=(), rank=rank) for op in ops] for rank, ops in program.items()})
    for plan in plans:
        _check_owners(plan)
    planned = {(op.rank, op.name): op for plan in plans for ops in plan.program.values() for op in ops}
    for ops in program.values():
        _take_off(ops, planned)
    for op in planned.values():
        raise ValueError(f"{where(op)} is in the plan and not in the step; each bucket needs one")


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
