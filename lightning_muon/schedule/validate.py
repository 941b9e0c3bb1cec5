"""Refuse broken programs, by name of the op, before any rank runs them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import zip_longest

from lightning_muon.schedule.graph import Communications, build_graph
from lightning_muon.schedule.memory import peak_memory
from lightning_muon.schedule.muon import MuonPlan
from lightning_muon.schedule.program import COMPUTE, RECV, SEND, TRANSFER, Op, Program
from lightning_muon.schedule.validate_step import validate_step

_LANES = (COMPUTE, TRANSFER)


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
                f"memory_bytes={memory_bytes}; lower the look-ahead or the chunk size"
            )


def check_plan(plan: MuonPlan) -> None:
    """Check all that is known of a plan: :func:`validate` and :func:`~.validate_step.validate_step`.

    Takes time in the number of ops. Where the plan lists the ops of some ranks only, communications count as what a
    rank does alone: that all ranks have them in the same order is what equal :meth:`~.muon.MuonPlan.fingerprint` say.

    Raises:
        ValueError: Names the op and its rank.
    """
    is_whole = len(plan.program) == len(plan.flops)
    validate(plan.program if is_whole else {rank: [_alone(op) for op in ops] for rank, ops in plan.program.items()})
    validate_step(plan.program, plan.owners, is_whole=is_whole)


def _alone(op: Op) -> Op:
    return replace(op, group=()) if op.group else op


def _check_rank(rank: int, ops: list[Op]) -> None:
    used = {name for op in ops for name in op.deps}
    for op in ops:
        if op.rank != rank:
            raise ValueError(f"{op.name} is an op of rank {op.rank} in the list of rank {rank}; assign it first")
        if op.lane not in _LANES:
            raise ValueError(f"{op.name} of rank {rank} is on the lane {op.lane!r}; lanes are {_LANES}")
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
                found.setdefault(matches.group_number(op), []).append(op.name)
        for group, names in found.items():
            first, wanted = expected.setdefault(group, (rank, names))
            for mine, theirs in zip_longest(names, wanted):
                if mine != theirs:
                    raise ValueError(
                        f"rank {rank} has {mine} where rank {first} has {theirs}: communications of one group must "
                        "come in the same order on all of its ranks"
                    )


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
