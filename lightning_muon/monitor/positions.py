"""Where a rank stands while it does not get on, and what the positions of all ranks prove."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations

import torch.distributed as dist

from lightning_muon.compat.torch import collective_counts
from lightning_muon.sharding.unit_order import UnitOrder

_TORCH_DISTRIBUTED = os.path.join("torch", "distributed") + os.sep


@dataclass(frozen=True, kw_only=True)
class Position:
    """What one rank publishes.

    Attributes:
        step: Steps and evaluations that this rank has ended.
        shard: The lowest rank with which it shares the weights.
        mesh: The lowest rank with which it shares gradients.
        skipped: Number of notes of this step that are left out, the first ones; ranks further apart prove nothing.
        notes: The other notes of :class:`~lightning_muon.sharding.unit_order.UnitOrder`.
        crossing_skipped: As ``skipped``, of the notes that all ranks have in common.
        crossing: These notes.
        group: Name of the process group in whose collective the rank waits, ``None`` if it does something else. A gate
            of the order counts as a group of its own.
        counts: Collectives launched in each process group.
        beat: How often the rank has looked since it last got on.
        left: Whether the rank has ended its run.
        failure: The exception that ended the step of this rank.
    """

    step: int
    shard: int
    mesh: int
    skipped: int
    notes: list[int]
    crossing_skipped: int
    crossing: list[int]
    group: str | None
    counts: dict[str, int]
    beat: int = 0
    left: bool = False
    failure: str | None = None

    @classmethod
    def current(
        cls, order: UnitOrder, thread: int, *, beat: int, left: bool = False, failure: str | None = None
    ) -> Position:
        """The position of this process, whose ``thread`` trains; local."""
        skipped, notes = order.notes()
        crossing_skipped, crossing = order.crossing_notes()
        place = waiting_place(thread)
        return cls(
            step=order.step,
            shard=order.shard_ranks[0],
            mesh=order.ranks[0],
            skipped=skipped,
            notes=notes,
            crossing_skipped=crossing_skipped,
            crossing=crossing,
            group=None if place is None else place[0],
            counts=collective_counts(),
            beat=beat,
            left=left,
            failure=failure,
        )

    def with_gates(self, counts: Mapping[str, int], waits_in: str | None) -> Position:
        """Add to how many gates of each name the rank has come, and the one in which it waits."""
        return replace(self, group=waits_in or self.group, counts={**self.counts, **counts})

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Position:
        """The inverse of :meth:`to_text`."""
        return cls(**json.loads(text))


def waiting_place(thread: int) -> tuple[str, int] | None:
    """The collective of torch.distributed in which a thread is: (name of its group, identity of the call)."""
    frame = sys._current_frames().get(thread)
    if frame is None or _TORCH_DISTRIBUTED not in frame.f_code.co_filename:
        return None
    known = frame.f_locals
    if "group" not in known and "pg" not in known:
        return None
    group = known.get("group") or known.get("pg") or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        return None
    try:
        return group.group_name, id(frame)
    except RuntimeError:  # It is being made, and has no name yet.
        return None


def find_mismatch(positions: Mapping[int, Position], order: UnitOrder) -> str | None:
    """The reason why these ranks can never meet, ``None`` if they may.

    Args:
        positions: Global rank -> what it has published; ranks that get on have published nothing, or something old.
        order: Names the units.
    """
    differing = _different_notes(positions, order)
    if differing is not None:
        return differing
    for (first, a), (second, b) in combinations(sorted(positions.items()), 2):
        if _never_meet(a, b):
            places = f"rank {first} {_place(a, order)}, rank {second} {_place(b, order)}"
            notes = [position.notes[-1] for position in (a, b) if position.notes]
            return f"The ranks wait for each other in different places: {places}. {order.advice(notes)}"
    return None


def _different_notes(positions: Mapping[int, Position], order: UnitOrder) -> str | None:
    """Compare the notes of ranks in the same step: all of them inside each shard group, others over each mesh."""
    compared: dict[tuple[int, bool, int], dict[int, tuple[int, list[int]]]] = {}
    for rank, position in positions.items():
        own = compared.setdefault((position.step, False, position.shard), {})
        own[rank] = position.skipped, position.notes
        everyone = compared.setdefault((position.step, True, position.mesh), {})
        everyone[rank] = position.crossing_skipped, position.crossing
    # The notes of a shard group say more.
    for _, tails in sorted(compared.items(), key=lambda item: item[0][1]):
        found = order.describe_tails(tails, complete=False)
        if found is not None:
            return found
    return None


def _never_meet(a: Position, b: Position) -> bool:
    """Whether each waits for something that the other will not launch before it.

    A rank waits in the last collective that it has launched in that group. Being ahead in one group proves nothing:
    the other may be slow.
    """
    if a.group is None or b.group is None or a.step != b.step or min(a.beat, b.beat) < 2:
        return False
    if a.group == b.group:
        same_collective = a.counts.get(a.group) == b.counts.get(a.group)
        return same_collective and _ends_differ(a, b)
    in_both = all(group in position.counts for group in (a.group, b.group) for position in (a, b))
    return in_both and b.counts[a.group] < a.counts[a.group] and a.counts[b.group] < b.counts[b.group]


def _ends_differ(a: Position, b: Position) -> bool:
    """Whether the ranks have noted differently much of what they must have in common."""
    if a.shard == b.shard:
        return a.skipped + len(a.notes) != b.skipped + len(b.notes)
    if a.mesh != b.mesh:
        return False
    return a.crossing_skipped + len(a.crossing) != b.crossing_skipped + len(b.crossing)


def _place(position: Position, order: UnitOrder) -> str:
    last = order.text(position.notes[-1]) if position.notes else "has run no unit in this step"
    return f"waits after it {last}" if position.notes else last
