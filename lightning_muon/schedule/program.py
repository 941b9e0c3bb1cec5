"""Programs: the ops of every rank as data, their order, and their dependencies.

The program of a step is made once, ordered by :func:`issue_ahead`, checked by :func:`validate`, timed by
:func:`~.simulate.simulate`, and run by :class:`~lightning_muon.optim.matrix_step.MatrixStep`, but for buckets without
gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

# Lanes.
COMPUTE = "compute"
TRANSFER = "transfer"
# Number of ops that an error names; it also says how many more there are.
NAMED = 8
_Name = tuple[int, str]  # Rank and name of an op.


class OpKind:
    """Kinds of the ops of an optimizer step. Other programs have kinds of their own."""

    MOMENTUM = "momentum"  # Update the momentum of the local pieces of a bucket and pack what goes to the owners.
    GATHER = "gather"  # Bring the pieces to the owners.
    NEWTON_SCHULZ = "newton_schulz"  # Unpack, orthogonalize the owned matrices, and pack the updates.
    SCATTER = "scatter"  # Bring the updates back to the ranks that hold the pieces.
    UPDATE = "update"  # Weight decay and update of the local pieces of the weights.
    ADAMW = "adamw"  # AdamW for some of the parameters that are no matrices.


STEP_KINDS = (OpKind.MOMENTUM, OpKind.GATHER, OpKind.NEWTON_SCHULZ, OpKind.SCATTER, OpKind.UPDATE)
"""The ops of one bucket, in their order."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One step of one rank. Sizes are of this rank; an op never says how long it takes, a cost model does."""

    kind: str  # What is done, for example `"gather"`. Programs may have kinds of their own.
    key: str  # Which one, for example the number of a bucket. `kind` and `key` name the op within its rank.
    rank: int  # The rank that does it.
    cost: int = 0  # FLOPs.
    # Ops of one lane (`"compute"`, `"transfer"`, or a link of its own) run one after the other, in program order; the
    # lanes run side by side.
    lane: str = COMPUTE
    deps: tuple[str, ...] = ()  # Names of ops of the same rank that must end before this one begins.
    # On the transfer lane, what this rank sends or receives, whichever is more. On the compute lane, what the op reads
    # and writes in memory beside its FLOPs.
    bytes: int = 0
    # `bytes` by kind of link, the fastest first, for links of different speed; for each of them what is sent or
    # received, whichever is more. Empty if there is one kind of link.
    axis_bytes: tuple[int, ...] = ()
    memory: int = 0  # Bytes of the op's result, which live until the last op that depends on it has ended.
    items: tuple[int, ...] = ()  # Indices of what it works on, for example matrices.
    # Ranks that take part in a communication. It begins when all of them have reached their op of this name. Empty if
    # a rank does it alone.
    group: tuple[int, ...] = ()

    @cached_property
    def name(self) -> str:
        """``kind[key]``: the name of the op in ``deps``, pictures and traces."""
        return f"{self.kind}[{self.key}]"


Program = dict[int, list[Op]]
"""Rank -> its ops, in the order in which the rank issues them."""


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
