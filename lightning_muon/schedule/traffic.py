"""The bytes that a plan moves, against the fewest that could do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_muon.schedule.counts import RankTraffic, count_elements
from lightning_muon.schedule.holdings import MatrixSpec, holdings
from lightning_muon.schedule.muon import MuonPlan


@dataclass(frozen=True, kw_only=True)
class TrafficFloor:
    """Fewest bytes of all ranks together, ``(within the replicas, between replicas)``."""

    gather: tuple[int, int]
    scatter: tuple[int, int]


def traffic(
    plan: MuonPlan, specs: Sequence[MatrixSpec], *, itemsize: int, replica_of: Sequence[int] | None = None
) -> list[RankTraffic]:
    """Bytes that each rank holds, owns, sends and receives in one step of the plan.

    Args:
        plan: Made from ``specs``.
        specs: The matrices.
        itemsize: Bytes of an element on the wire.
        replica_of: As in :func:`~.muon.plan_step`.
    """
    where = holdings(specs, [0] * len(plan.flops) if replica_of is None else replica_of)
    return [_in_bytes(count, itemsize) for count in count_elements(dict(enumerate(plan.owners)), where)]


def traffic_floor(
    plan: MuonPlan, specs: Sequence[MatrixSpec], *, itemsize: int, replica_of: Sequence[int] | None = None
) -> TrafficFloor:
    """Fewest bytes with which the first owner of each matrix can compute it and tell all others.

    All of a matrix but the owner's piece has to reach the owner once, from within its replica, and the same bytes have
    to go back; each of the R replicas but the owner's gets the whole update once, ``(R - 1) * numel`` together.
    """
    where = holdings(specs, [0] * len(plan.flops) if replica_of is None else replica_of)
    within, between = 0, 0
    for matrix, owners in enumerate(plan.owners):
        layout = where.layout(matrix)
        in_replica = layout.replica_numel.get(where.replica_of[owners[0]], 0)
        within += in_replica - layout.held[owners[0]]
        between += layout.total - in_replica
    return TrafficFloor(gather=(within * itemsize, 0), scatter=(within * itemsize, between * itemsize))


def _in_bytes(count: RankTraffic, itemsize: int) -> RankTraffic:
    def both(pair: tuple[int, int]) -> tuple[int, int]:
        return pair[0] * itemsize, pair[1] * itemsize

    return RankTraffic(
        held=count.held * itemsize,
        owned=count.owned * itemsize,
        gather_sent=both(count.gather_sent),
        gather_received=both(count.gather_received),
        scatter_sent=both(count.scatter_sent),
        scatter_received=both(count.scatter_received),
    )
