"""The last pass: all ops that a rank runs in an optimizer step, in order.

The program of a step is made here once, is checked by :func:`check_step`, timed by
:func:`~.simulate.simulate`, and run by :class:`~lightning_muon.optim.matrix_step.MatrixStep`, but for buckets without
gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from lightning_muon.schedule.exchange import ExchangeGroup
from lightning_muon.schedule.graph import NAMED, validate, where
from lightning_muon.schedule.program import STEP_KINDS, Op, OpKind, Program


def issue_ahead(program: Program, look_ahead: int) -> Program:
    """Let transfers of other buckets run while a rank computes.

    Momentum and gather of the first ``look_ahead`` buckets are issued first, then AdamW. After that, for each bucket
    k: Newton-Schulz and scatter of k, update of an earlier bucket, momentum and gather of k + look_ahead. With 0 the
    program stays serial. With 1 only AdamW and updates overlap with transfers, since the gather of k + 1 queues
    behind the scatter of k; 2 is the least that lets a gather run beside Newton-Schulz.

    There are buffers for ``look_ahead`` gathers and for s = :func:`scatter_buffers_for` scatters, so momentum k waits
    for Newton-Schulz k - look_ahead, and Newton-Schulz k for update k - s.
    """
    return {rank: _issued(ops, look_ahead) for rank, ops in program.items()} if look_ahead else program


def scatter_buffers_for(look_ahead: int) -> int:
    """Number of scatter buffers for a look-ahead: with fewer, all ranks wait for the slowest owner of a bucket."""
    return max(2, look_ahead)


def _issued(ops: Sequence[Op], look_ahead: int) -> list[Op]:
    adamw: list[Op] = []
    by_key: dict[str, dict[str, Op]] = {}
    for op in ops:
        if op.kind == OpKind.ADAMW:
            adamw.append(op)
        elif op.kind in STEP_KINDS:
            by_key.setdefault(op.key, {})[op.kind] = op
        else:
            raise ValueError(f"issue_ahead does not know where to put {op.name} of rank {op.rank}; add it afterwards")
    buckets = list(by_key.values())
    scatter_buffers = scatter_buffers_for(look_ahead)
    delay = scatter_buffers - 1
    stages = (
        (0, (OpKind.NEWTON_SCHULZ, OpKind.SCATTER)),
        (-delay, (OpKind.UPDATE,)),
        (look_ahead, (OpKind.MOMENTUM, OpKind.GATHER)),
    )
    issued: list[Op] = []
    for turn in range(-look_ahead, len(buckets) + delay):
        issued += adamw if turn == 0 else []
        for distance, kinds in stages:
            if 0 <= turn + distance < len(buckets):
                bucket = buckets[turn + distance]
                issued += [bucket[kind] for kind in kinds if kind in bucket]
    frees = _buffer_deps(buckets, OpKind.MOMENTUM, OpKind.NEWTON_SCHULZ, look_ahead)
    frees |= _buffer_deps(buckets, OpKind.NEWTON_SCHULZ, OpKind.UPDATE, scatter_buffers)
    return [replace(op, deps=(*op.deps, frees[op.name])) if op.name in frees else op for op in issued]


def _buffer_deps(buckets: Sequence[Mapping[str, Op]], kind: str, frees: str, distance: int) -> dict[str, str]:
    """Name of an op that fills a buffer -> name of the op that must have emptied it before."""
    return {
        later[kind].name: earlier[frees].name
        for earlier, later in zip(buckets, buckets[distance:], strict=False)
        if kind in later and frees in earlier
    }


def check_step(program: Program, groups: Sequence[ExchangeGroup], *, is_whole: bool = True) -> None:
    """Check that a program of :func:`issue_ahead` can run, and that it does what the groups' plans say, once.

    If only some ranks are listed (not ``is_whole``), communications count as ops of single ranks: their order is
    compared between ranks elsewhere.
    """
    if is_whole:
        validate(program)
    else:
        validate({rank: [replace(op, group=(), rank=rank) for op in ops] for rank, ops in program.items()})
    for group in groups:
        _check_owners(group)
    planned = {(op.rank, op.name): op for group in groups for ops in group.program.values() for op in ops}
    for ops in program.values():
        _take_off(ops, planned)
    for op in planned.values():
        raise ValueError(f"{where(op)} is in the plan and not in the step; each bucket needs one")


def _check_owners(group: ExchangeGroup) -> None:
    """Check that each matrix is in one bucket, and is orthogonalized once on each of its owners."""
    if sorted(chain.from_iterable(group.buckets)) != list(range(len(group.matrices))):
        raise ValueError(f"the buckets {group.buckets[:NAMED]} must have each of {len(group.matrices)} matrices once")
    ops = [op for listed in group.program.values() for op in listed if op.kind == OpKind.NEWTON_SCHULZ]
    found = Counter((matrix, op.rank) for op in ops for matrix in op.items)
    wanted = Counter((number, rank) for number, matrix in enumerate(group.matrices) for rank in matrix.owners)
    for matrix, rank in (found - wanted) + (wanted - found):
        if rank in group.program:
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
