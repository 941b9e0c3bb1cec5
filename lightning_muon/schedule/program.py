"""Programs: the ops of every rank as data, their order, and their dependencies."""

from __future__ import annotations

from dataclasses import dataclass

# Lanes.
COMPUTE = "compute"
TRANSFER = "transfer"


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

    @property
    def name(self) -> str:
        """``kind[key]``: the name of the op in ``deps``, pictures and traces."""
        return f"{self.kind}[{self.key}]"


Program = dict[int, list[Op]]
"""Rank -> its ops, in the order in which the rank issues them."""
