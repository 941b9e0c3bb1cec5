"""A schedule as data: what every rank does, in which order, and what must come before what."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE = "compute"
TRANSFER = "transfer"
SEND = "send"
RECV = "recv"
"""``send[key]`` on one rank and ``recv[key]`` on the other, with the same two ranks as group, are one communication."""
UNASSIGNED = -1
"""Rank of ops that no rank has been chosen for yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One step of one rank. Sizes are of this rank; an op never says how long it takes, a cost model does.

    Attributes:
        kind: What is done, for example ``"gather"``. Programs are free to invent kinds.
        key: Which one, for example the number of a bucket. ``kind`` and ``key`` name the op within its rank.
        rank: Who does it.
        cost: FLOPs.
        lane: Ops of one lane (``"compute"`` or ``"transfer"``) run one after the other, in program order; the lanes run
            side by side.
        deps: Names of ops of the same rank that must end before this one begins.
        bytes: On the transfer lane, what this rank sends or receives, whichever is more. On the compute lane, what the
            op reads and writes in memory beside its FLOPs.
        axis_bytes: ``bytes`` by kind of link, the fastest first, for links of different speed; for each of them what
            is sent or received, whichever is more. Empty where there is one kind of link.
        memory: Bytes of the op's result, which live until the last op that depends on it has ended.
        items: Indices of what it works on, for example matrices.
        group: Ranks that take part in a communication. It begins when all of them have reached their op of this name.
            Empty for what a rank does alone.
    """

    kind: str
    key: str
    rank: int
    cost: int = 0
    lane: str = COMPUTE
    deps: tuple[str, ...] = ()
    bytes: int = 0
    axis_bytes: tuple[int, ...] = ()
    memory: int = 0
    items: tuple[int, ...] = ()
    group: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """``kind[key]``: what ``deps`` refer to, and the name of the op in pictures and traces."""
        return f"{self.kind}[{self.key}]"


Program = dict[int, list[Op]]
"""Rank -> its ops, in the order in which the rank issues them."""

# Kinds of the ops of an optimizer step.
MOMENTUM = "momentum"
"""Update the momentum of the local pieces of a bucket and pack what goes to the owners."""
GATHER = "gather"
"""Bring the pieces to the owners."""
NEWTON_SCHULZ = "newton_schulz"
"""Unpack, orthogonalize the owned matrices, and pack the updates."""
SCATTER = "scatter"
"""Bring the updates back to the ranks that hold the pieces."""
UPDATE = "update"
"""Weight decay and update of the local pieces of the weights."""
ADAMW = "adamw"
"""AdamW for all parameters that are no matrices."""
BACKWARD = "backward"
"""The part of backward that ends with the last gradient of a bucket."""

STEP_KINDS = (MOMENTUM, GATHER, NEWTON_SCHULZ, SCATTER, UPDATE)
"""The ops of one bucket, in their order."""
