"""What waits for what in a program: dependencies, lanes, and communications of several ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_muon.schedule.program import Op, Program

# Number of ops that an error names; it also says how many more there are.
NAMED = 8
_Name = tuple[int, str]  # Rank and name of an op.


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
    deque(in_order(program), maxlen=0)


def in_order(program: Program) -> Iterator[list[Op]]:
    """Yield ops that begin and end together, one or those of a communication, after all that they wait for.

    Takes time linear in the number of ops and dependencies. A ``ValueError`` says which names, dependencies or groups
    are wrong, and at the end which ops can never begin.
    """
    ops = {(op.rank, op.name): op for listed in program.values() for op in listed}
    waits: dict[_Name, list[_Name]] = {}
    for listed in program.values():
        waits |= _waits_of_rank(listed)
    # What begins together has one key.
    key_of: dict[_Name, Any] = {}
    together: dict[Any, list[Op]] = {}
    # By identity, since groups of thousands of ranks are long; ids stay valid while the program lives.
    groups: dict[int, frozenset[int]] = {}
    for name, op in ops.items():
        key_of[name] = name
        if len(op.group) > 1:
            group = groups.get(id(op.group)) or groups.setdefault(id(op.group), frozenset(op.group))
            if op.rank not in group or len(group) != len(op.group):
                raise ValueError(f"{where(op)} is a communication of {op.group[:NAMED]}; it must be in there, and once")
            key_of[name] = op.name, group
        together.setdefault(key_of[name], []).append(op)
    missing = {key: (len(members[0].group) or 1) - len(members) for key, members in together.items()}
    after: dict[_Name, list[_Name]] = {name: [] for name in ops}
    for name, before in waits.items():
        missing[key_of[name]] += len(before)
        for other in before:
            after[other].append(name)
    ready = deque(key for key, number in missing.items() if not number)
    ended: set[_Name] = set()
    while ready:
        members = together[ready.popleft()]
        yield members
        for op in members:
            ended.add((op.rank, op.name))
            for later in after[op.rank, op.name]:
                missing[key_of[later]] -= 1
                if not missing[key_of[later]]:
                    ready.append(key_of[later])
    if len(ended) < len(ops):
        raise ValueError(_deadlock(ops, waits, ended))


def _waits_of_rank(ops: list[Op]) -> dict[_Name, list[_Name]]:
    """For each op of a rank those that must end before: those of ``deps``, and the previous one in its lane."""
    names: set[str] = set()
    for op in ops:
        if op.name in names:
            raise ValueError(f"{where(op)} is there twice; give each op of a rank a kind and key of its own")
        names.add(op.name)
    waits: dict[_Name, list[_Name]] = {}
    last: dict[str, str] = {}  # Lane -> its last op so far.
    for op in ops:
        for name in op.deps:
            if name not in names:
                raise ValueError(f"{where(op)} depends on {name}, which this rank does not have; check deps")
        before = (*op.deps, last[op.lane]) if op.lane in last else op.deps
        waits[op.rank, op.name] = [(op.rank, name) for name in before]
        last[op.lane] = op.name
    return waits


def _deadlock(ops: Mapping[_Name, Op], waits: Mapping[_Name, list[_Name]], ended: set[_Name]) -> str:
    """Say what the first op of each rank that cannot begin waits for."""
    stuck = [name for name in ops if name not in ended]
    firsts: dict[int, _Name] = {}
    for name in stuck:
        firsts.setdefault(name[0], name)
    lines: list[str] = []
    for name in list(firsts.values())[:NAMED]:
        op, own = ops[name], [other for _, other in waits[name] if (name[0], other) not in ended]
        others = {rank: ops.get((rank, op.name)) for rank in sorted(set(op.group))}
        here = {rank for rank, other in others.items() if other and set(other.group) == set(op.group)}
        absent = [f"rank {rank}" for rank in others if rank not in here or not ended.issuperset(waits[rank, op.name])]
        lines.append(f"{where(op)} waits for {', '.join(own or absent[:NAMED])}")
    more = f"; and {len(firsts) - NAMED} more ranks" if len(firsts) > NAMED else ""
    return f"deadlock, {len(stuck)} ops can never begin: " + "; ".join(lines) + more


def where(op: Op) -> str:
    """The op and its rank, for messages."""
    return f"{op.name} of rank {op.rank}"
