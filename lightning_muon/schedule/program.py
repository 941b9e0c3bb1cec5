"""Programs: the ops of every rank as data, their order, and their dependencies.

The program of a step is made once, ordered by :func:`issue_ahead`, checked by :func:`~.graph.validate`, timed by
:func:`~.simulate.simulate`, and run by :class:`~lightning_muon.optim.matrix_step.MatrixStep`, but for buckets without
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
