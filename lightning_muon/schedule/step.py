"""The last pass: everything that a rank runs in an optimizer step, in its order, with the branches of the step.

The program of a step is made here once, is checked by :func:`~.validate.check_step`, timed by
:func:`~.simulate.simulate` (a :func:`~.program.branch` of it), and run as it is by
:class:`~lightning_muon.optim.matrix_step.MatrixStep`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_muon.schedule.passes import prefetch, scatter_buffers_for
from lightning_muon.schedule.program import (
    ADAMW,
    CHECK,
    DEFERRED,
    EARLY_GATHER,
    EARLY_KINDS,
    EARLY_MOMENTUM,
    EVERY_KEY,
    GATHER,
    GRADIENTS,
    IN_BACKWARD,
    IN_STEP,
    MOMENTUM,
    NEWTON_SCHULZ,
    SENT,
    UPDATE,
    VALID,
    Facts,
    Op,
    Program,
)

ALL_IN_STEP: Facts = {GRADIENTS: EVERY_KEY}
"""Every bucket has gradients, and nothing was sent during backward."""
ALL_EARLY: Facts = {GRADIENTS: EVERY_KEY, SENT: EVERY_KEY, VALID: EVERY_KEY}
"""Every bucket has gradients, and what can be sent during backward was sent, and counts."""
_EARLY_OF = {kind: early for early, kind in EARLY_KINDS.items()}
# In the key of an adamw op that waits for the check.
_AFTER_CHECK = "after check"


@dataclass(frozen=True, kw_only=True)
class AddedOps:
    """Ops of one rank besides those of its matrices: sums of gradients, messages between nodes, new weights."""

    first: Sequence[Op] = ()  # In front of all others of their phase.
    # Name of an op of the step -> what comes in front of it.
    ahead: Mapping[str, Sequence[Op]] = field(default_factory=dict[str, Sequence[Op]])
    # Ops in their order, and the names of those that need them: each comes right in front of the first op that needs
    # it, or one listed behind it.
    needed: Sequence[tuple[Op, Collection[str]]] = ()
    # Name of an op of the step -> what follows it.
    after: Mapping[str, Sequence[Op]] = field(default_factory=dict[str, Sequence[Op]])
    last: Sequence[Op] = ()  # Behind all others.


NOTHING_ADDED = AddedOps()


def step_program(
    program: Program,
    *,
    look_ahead: int,
    early: Collection[str] = (),
    is_late: bool = False,
    memory_bytes: int | None = None,
    added: Mapping[int, AddedOps] | None = None,
) -> Program:
    """Overlap transfers with arithmetic (:func:`~.passes.prefetch`), and add the branches of the step.

    - A bucket runs only if one of its parameters has a gradient.
    - A bucket of ``early`` is also in the backward phase: ``early_momentum`` and ``early_gather`` run once a rank has
      sent it. Momentum and gather of the step do not run if what was sent is valid.
    - ``check`` comes in front of the first op that changes anything.
    - AdamW runs while the first gathers are on their way. If the check is deferred, or gradients are late, it follows
      the check instead.

    Args:
        program: For each rank the ops of its buckets in canonical order, and any number of ``adamw`` ops.
        look_ahead: Buckets whose gathers may be on their way; 0 for none beside arithmetic.
        early: Keys of the buckets that may be sent during backward.
        is_late: Whether gradients may still be arriving when the step begins.
        memory_bytes: Upper bound of the buffers of each rank, see :func:`~.passes.prefetch`.
        added: Rank -> other ops. Those next to ``adamw`` ops need ``is_late``.

    Raises:
        ValueError: The buffers do not fit, or there is no place for an added op.
    """
    issued = prefetch(program, look_ahead, memory_bytes, scatter_buffers=scatter_buffers_for(look_ahead))
    added = added or {}
    return {
        rank: _with_branches(program[rank], ops, set(early), added.get(rank, NOTHING_ADDED), is_late=is_late)
        for rank, ops in issued.items()
    }


def _with_branches(
    canonical: Sequence[Op], issued: Sequence[Op], early: Collection[str], added: AddedOps, *, is_late: bool
) -> list[Op]:
    around = _Around(added)
    backward = [op for op in added.first if op.phase == IN_BACKWARD]
    backward += [_in_backward(op) for op in canonical if op.key in early and op.kind in _EARLY_OF]
    steps = [op for op in added.first if op.phase == IN_STEP]
    adamw = [op for op in issued if op.kind == ADAMW]
    is_checked = False
    for op in issued:
        if op.kind == UPDATE and not is_checked:
            steps += _check_and_adamw(op.rank, adamw, around, is_late=is_late)
            is_checked = True
        if op.kind != ADAMW:
            steps += around.place(_of_bucket(op, is_early=op.key in early))
        elif not is_late:
            steps += [*around.needed_by(op), replace(op, unless=(DEFERRED,))]
    if not is_checked and issued:
        steps += _check_and_adamw(issued[0].rank, adamw, around, is_late=is_late)
    around.require_all_placed()
    return [*backward, *steps, *added.last]


def _in_backward(op: Op) -> Op:
    deps = (f"{EARLY_MOMENTUM}[{op.key}]",) if op.kind == GATHER else ()
    return replace(op, kind=_EARLY_OF[op.kind], phase=IN_BACKWARD, deps=deps, when=(SENT,))


def _of_bucket(op: Op, *, is_early: bool) -> Op:
    """With the conditions of its bucket."""
    unless = (VALID,) if is_early and op.kind in (MOMENTUM, GATHER) else ()
    deps = (*op.deps, f"{EARLY_GATHER}[{op.key}]") if is_early and op.kind == NEWTON_SCHULZ else op.deps
    return replace(op, deps=deps, when=(GRADIENTS,), unless=unless)


def _check_and_adamw(rank: int, adamw: Sequence[Op], around: _Around, *, is_late: bool) -> list[Op]:
    """What comes in front of the first update."""
    ops = [Op(kind=CHECK, key="", rank=rank, when=(DEFERRED,))]
    for op in adamw:
        if is_late:
            ops += around.place(op)
        else:
            ops.append(replace(op, key=f"{op.key} {_AFTER_CHECK}".strip(), when=(DEFERRED,)))
    return ops


class _Around:
    """Puts added ops next to those that they belong to."""

    def __init__(self, added: AddedOps) -> None:
        self._ahead, self._after, self._needed = dict(added.ahead), dict(added.after), list(added.needed)

    def place(self, op: Op) -> list[Op]:
        """An op between its neighbors."""
        return [*self.needed_by(op), *self._ahead.pop(op.name, ()), op, *self._after.pop(op.name, ())]

    def needed_by(self, op: Op) -> list[Op]:
        """What an op needs, and all that is listed before it, if it was not placed already."""
        users = [number for number, (_, names) in enumerate(self._needed, 1) if op.name in names]
        placed, self._needed = self._needed[: max(users, default=0)], self._needed[max(users, default=0) :]
        return [needed for needed, _ in placed]

    def require_all_placed(self) -> None:
        """Raise if a neighbor was never placed."""
        for op, names in self._needed:
            raise ValueError(f"{op.name} is needed by {sorted(names)}, of which the step has none")
        for name in (*self._ahead, *self._after):
            raise ValueError(f"ops were added next to {name}, which is not in the step, or may be in two places")


def fingerprint(ops: Sequence[Op], names: Collection[str] | None = None) -> str:
    """Digest of the communications of a rank in their order, with their conditions.

    Args:
        ops: Of one rank.
        names: Count only ops of these names, for example those of one group of ranks.
    """
    counted = [op for op in ops if op.group and (names is None or op.name in names)]
    lines = [(op.name, op.phase, op.when, op.unless) for op in counted]
    return hashlib.sha256(repr(lines).encode()).hexdigest()
