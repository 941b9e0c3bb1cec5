"""The numbers of a plan, as text and JSON show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_muon.cli.plan_choice import Choice
from lightning_muon.cli.plan_specs import Mesh, route_of
from lightning_muon.cli.plan_strategies import Outcome, PlanOptions
from lightning_muon.schedule.gram import GramCost, gram_costs
from lightning_muon.schedule.shapes import ModelShapes

AXES = ("within a replica", "between replicas")
DIRECTIONS = ("gather", "scatter")


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes of one strategy in one direction over one axis.

    Attributes:
        direction: ``"gather"`` or ``"scatter"``.
        axis: Name.
        most: Of the busiest rank, the larger of sent and received.
        total: Sent by all ranks.
        floor: Least total.
    """

    direction: str
    axis: str
    most: int
    total: int
    floor: int


def moved(outcome: Outcome) -> list[Moved]:
    """Where and how much a strategy sends, without axes that carry nothing."""
    found: list[Moved] = []
    for direction in DIRECTIONS:
        for axis, name in enumerate(AXES):
            # What one rank sends, another receives, so sums of both are equal; the redundant one shows what it gets.
            received = [getattr(rank, f"{direction}_received")[axis] for rank in outcome.bytes]
            sent = [getattr(rank, f"{direction}_sent")[axis] for rank in outcome.bytes]
            floor = getattr(outcome.floor, direction)[axis]
            if any(received) or any(sent):
                most = max(*sent, *received)
                found.append(Moved(direction=direction, axis=name, most=most, total=sum(received), floor=floor))
    return found


@dataclass(frozen=True, kw_only=True)
class GramEstimate:
    """What the alternative would take.

    Attributes:
        cost: FLOPs and bytes.
        compute_seconds: Of the busiest rank.
        transfer_seconds: Of the busiest rank.
    """

    cost: GramCost
    compute_seconds: float
    transfer_seconds: float

    @property
    def at_best(self) -> float:
        """All transfers hidden."""
        return max(self.compute_seconds, self.transfer_seconds)

    @property
    def at_worst(self) -> float:
        """No transfer hidden."""
        return self.compute_seconds + self.transfer_seconds


def gram_estimates(outcomes: Sequence[Outcome], options: PlanOptions) -> list[GramEstimate]:
    """The alternatives on Gram matrices, if there are more ranks than matrices; else none."""
    ranks = outcomes[-1].ranks
    if ranks.num_ranks <= len(ranks.specs):
        return []
    costs = gram_costs(
        [(spec.rows, spec.cols) for spec in ranks.specs],
        num_ranks=ranks.num_ranks,
        num_steps=options.ns_steps,
        itemsize=options.wire_itemsize,
    )
    # The ranks of a matrix may be anywhere, so the slowest link counts.
    return [
        GramEstimate(
            cost=cost,
            compute_seconds=cost.flops / options.cost.flops_per_second,
            transfer_seconds=cost.bytes / options.cost.bandwidth[-1],
        )
        for cost in costs
    ]


def plan_as_dict(
    model: ModelShapes,
    mesh: Mesh,
    options: PlanOptions,
    outcomes: Sequence[Outcome],
    *,
    choice: Choice | None = None,
    slow_links: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything, for ``--json``: seconds, bytes, FLOPs and shares.

    Args:
        model: Shapes.
        mesh: Sizes.
        options: Of the plan.
        outcomes: All strategies; none for an optimizer without Newton-Schulz.
        choice: What the config runs, if there is one.
        slow_links: What FlexDeMo sends, if it is the optimizer.
    """
    base = slow_links["base"] if slow_links and not outcomes else None
    return {
        "model": {
            "name": model.name,
            "source": model.source,
            "parameters": [
                {**asdict(parameter), "algorithm": base or route_of(parameter).algorithm}
                for parameter in model.parameters
            ],
            "matrices": [spec.name for spec in outcomes[0].ranks.specs] if outcomes else [],
        },
        "mesh": {**asdict(mesh), "ranks": mesh.size},
        "options": {**asdict(options), "cost": options.cost.to_dict()},
        "config": choice.to_dict() if choice is not None else None,
        "flexdemo": slow_links,
        "strategies": {outcome.name: _outcome_as_dict(outcome) for outcome in outcomes},
        "gram": [
            {
                **asdict(estimate.cost),
                "compute_seconds": estimate.compute_seconds,
                "transfer_seconds": estimate.transfer_seconds,
            }
            for estimate in (gram_estimates(outcomes, options) if outcomes else [])
        ],
    }


def _outcome_as_dict(outcome: Outcome) -> dict[str, Any]:
    busiest, mean = max(outcome.loads), sum(outcome.loads) / len(outcome.loads)
    is_redundant = any(len(owners) > 1 for owners in outcome.owners)
    return {
        "makespan_seconds": outcome.timeline.makespan,
        "idle": outcome.idle,
        "idle_of_idlest": max(each.idle for each in outcome.summaries),
        "hidden": outcome.hidden,
        "exposed_seconds_of_worst": max(each.exposed_seconds for each in outcome.summaries),
        "peak_buffer_bytes": outcome.timeline.peak_bytes,
        "newton_schulz_bytes": outcome.newton_schulz_bytes,
        "early_gathers": {**asdict(outcome.early), "pay": outcome.early.pays} if outcome.early is not None else None,
        "num_chunks": outcome.num_chunks,
        "chunk_bytes": {"mean": sum(outcome.chunk_bytes) / outcome.num_chunks, "max": max(outcome.chunk_bytes)},
        "load": {
            "max_flops": busiest,
            "mean_flops": mean,
            "bound_flops": outcome.lower_bound,
            "max_over_mean": busiest / mean,
            "max_over_bound": busiest / outcome.lower_bound,
            "ranks_without_matrix": sum(not load for load in outcome.loads),
            "flops_of_ranks": list(outcome.loads),
        },
        "owners": "all ranks" if is_redundant else [owner for (owner,) in outcome.owners],
        "bytes": [asdict(each) for each in moved(outcome)],
        "note": outcome.note,
    }
