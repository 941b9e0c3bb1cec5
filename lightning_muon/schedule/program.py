"""Programs: the ops of every rank as data, their order, and their dependencies."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

# Lanes.
COMPUTE = "compute"
TRANSFER = "transfer"


class Condition:
    """Conditions of ops: each holds for some keys in a step, the same on all ranks that share an op."""

    GRADIENTS = "gradients"  # Some parameter of the bucket has a gradient.
    # Only after `check` has waited, for a device for example, it is known whether the step may change anything.
    DEFERRED = "deferred"


class OpKind:
    """Kinds of the ops of an optimizer step. Other programs have kinds of their own."""

    MOMENTUM = "momentum"  # Update the momentum of the local pieces of a bucket and pack what goes to the owners.
    GATHER = "gather"  # Bring the pieces to the owners.
    NEWTON_SCHULZ = "newton_schulz"  # Unpack, orthogonalize the owned matrices, and pack the updates.
    SCATTER = "scatter"  # Bring the updates back to the ranks that hold the pieces.
    UPDATE = "update"  # Weight decay and update of the local pieces of the weights.
    CHECK = "check"  # Wait until it is known whether all gradients are finite.
    ADAMW = "adamw"  # AdamW for some of the parameters that are no matrices.


STEP_KINDS = (OpKind.MOMENTUM, OpKind.GATHER, OpKind.NEWTON_SCHULZ, OpKind.SCATTER, OpKind.UPDATE)
"""The ops of one bucket, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    # Conditions under which it runs; all of them must hold for its key. Ops that depend on one that does not run do not
    # wait for it.
    when: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()  # Conditions under which it does not run, whatever `when` says.

    @property
    def name(self) -> str:
        """``kind[key]``: the name of the op in ``deps``, pictures and traces."""
        return f"{self.kind}[{self.key}]"


Program = dict[int, list[Op]]
"""Rank -> its ops, in the order in which the rank issues them."""

Facts = Mapping[str, Container[str]]
"""Condition -> the keys for which it holds in one step."""


class EveryKey:
    """The keys of a condition that does not depend on the key."""

    def __contains__(self, key: object) -> bool:
        return True


EVERY_KEY = EveryKey()


def runs(op: Op, facts: Facts) -> bool:
    """Whether an op runs in a step with these facts."""
    return all(op.key in facts.get(name, ()) for name in op.when) and not any(
        op.key in facts.get(name, ()) for name in op.unless
    )


def branch(program: Program, facts: Facts) -> Program:
    """The part of a program that runs in a step with these facts, as ops without conditions."""
    return without_absent({rank: [op for op in ops if runs(op, facts)] for rank, ops in program.items()})


def without_absent(program: Program) -> Program:
    """Remove dependencies on ops that are not in the program, and all conditions."""
    chosen: Program = {}
    for rank, ops in program.items():
        names = {op.name for op in ops}
        chosen[rank] = [
            op
            if not op.when and not op.unless and names.issuperset(op.deps)
            else replace(op, deps=tuple(name for name in op.deps if name in names), when=(), unless=())
            for op in ops
        ]
    return chosen
