"""The strategies that ``lightning-muon plan`` compares: their owners, bytes and predicted timelines."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lightning_muon.cli.plan_specs import ExchangeRanks, Mesh, exchange_ranks
from lightning_muon.schedule.assign import Strategy
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.crowd import Crowd, merge_equal_ranks
from lightning_muon.schedule.estimates import PrefetchEstimate, estimate_prefetch, rank_seconds
from lightning_muon.schedule.muon import MatrixSpec, MuonPlan, plan_step
from lightning_muon.schedule.passes import with_adamw
from lightning_muon.schedule.program import Op, Program, branch
from lightning_muon.schedule.shapes import ModelShapes
from lightning_muon.schedule.simulate import RankSummary, Timeline, simulate
from lightning_muon.schedule.step import ALL_IN_STEP, step_program
from lightning_muon.schedule.traffic import RankTraffic, TrafficFloor, traffic, traffic_floor
from lightning_muon.schedule.validate import check_step

PIPELINE = "lpt+pipeline"
GRID = "lpt+pipeline, owner grid"
# Of more ranks, one stands for all that do the same.
MOST_RANKS_IN_FULL = 16
# More ops than this are simulated with larger chunks.
_MOST_OPS = 20_000
_OPS_PER_CHUNK = 5


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the plan depends on beside model and mesh.

    Attributes:
        ns_steps: Newton-Schulz iterations.
        wire_itemsize: Bytes of an element that travels.
        chunk_bytes: Of whole matrices that an average rank owns of a chunk.
        look_ahead: Chunks whose gathers may be on their way.
        buffer_bytes: Upper bound of the buffers of a rank, or None.
        cost: The machine.
    """

    ns_steps: int
    wire_itemsize: int
    chunk_bytes: int
    look_ahead: int
    buffer_bytes: int | None
    cost: CostModel


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One strategy.

    Attributes:
        name: For tables.
        ranks: Who takes part.
        owners: Owners of each matrix.
        chunk_bytes: Of whole matrices of each chunk, per rank that owns some of it.
        loads: Newton-Schulz FLOPs of each rank.
        bytes: Of each rank.
        floor: The least that has to travel.
        timeline: Of one rank of each kind.
        early: Whether gathers during backward would pay; ``None`` if nothing is gathered.
        sizes: Rank in ``timeline`` -> number of ranks like it, itself among them.
        note: What was simplified.
    """

    name: str
    ranks: ExchangeRanks
    owners: tuple[tuple[int, ...], ...]
    chunk_bytes: tuple[int, ...]
    loads: tuple[int, ...]
    bytes: list[RankTraffic]
    floor: TrafficFloor
    timeline: Timeline
    early: PrefetchEstimate | None
    sizes: dict[int, int]
    note: str = ""

    @property
    def lower_bound(self) -> float:
        """No assignment has a smaller maximum, see :func:`lower_bound`."""
        return lower_bound(self.ranks.specs, len(self.loads))

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return len(self.chunk_bytes)

    @property
    def newton_schulz_bytes(self) -> int:
        """What Newton-Schulz of the dearest matrix takes in 16 bits: two l x s iterates and two s x s products."""
        dearest = max(self.ranks.specs, key=lambda spec: spec.flops)
        short, long = sorted((dearest.rows, dearest.cols))
        return 2 * (2 * long * short + 2 * short * short)

    @property
    def crowd(self) -> Crowd:
        """All ranks."""
        return Crowd(sizes=self.sizes, loads=self.loads)

    @property
    def idle(self) -> float:
        """Mean over all ranks of the idle share of the compute lane."""
        return self.crowd.idle(self.timeline)

    @property
    def hidden(self) -> float:
        """Share of all ranks' transfer seconds that run behind arithmetic."""
        return self.crowd.hidden(self.timeline)

    @property
    def summaries(self) -> Collection[RankSummary]:
        """One rank of each kind."""
        return self.timeline.ranks.values()


def lower_bound(specs: Sequence[MatrixSpec], num_ranks: int) -> float:
    """Least possible load of the busiest rank, in FLOPs.

    That is the mean, the dearest matrix, or the largest load of one rank that cannot travel, whichever is more.
    """
    total, dearest = 0, 0
    resident: dict[int, int] = {}
    holders = _sole_holders(specs)
    for spec in specs:
        total += spec.flops
        dearest = max(dearest, spec.flops)
        holder = holders[id(spec.held)]
        if holder is not None:
            resident[holder] = resident.get(holder, 0) + spec.flops
    return max(total / num_ranks, dearest, max(resident.values(), default=0))


def compare_strategies(model: ModelShapes, mesh: Mesh, options: PlanOptions) -> list[Outcome]:
    """All strategies on one model and mesh.

    With several replicas of several shards each, every replica does the same for itself, and the last strategy lets
    owners be anywhere on the grid.

    Raises:
        ValueError: If the model has no matrices that are trained.
    """
    alone = mesh.shard == 1  # Then replicas hold everything, and sharing among them is all there is.
    ranks = exchange_ranks(model, mesh, ns_steps=options.ns_steps, is_grid=alone)
    if not ranks.specs:
        raise ValueError(f"{model.name} has no matrices that are trained, so there is nothing to plan")
    serial = replace(options, look_ahead=0, buffer_bytes=None)
    planned = _plan(ranks, options, "lpt")
    lpt = _outcome("lpt", ranks, planned, serial)
    outcomes = [
        replace(_redundant(ranks, options), floor=lpt.floor),
        _outcome("round_robin", ranks, _plan(ranks, options, "round_robin"), serial),
        lpt,
        _outcome(PIPELINE, ranks, planned, options),
    ]
    if mesh.replicate > 1 and not alone:
        grid = exchange_ranks(model, mesh, ns_steps=options.ns_steps, is_grid=True)
        outcomes.append(_outcome(GRID, grid, _plan(grid, options, "lpt"), options))
    return outcomes


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """A plan before its transfers are overlapped with arithmetic."""

    plan: MuonPlan
    program: Program
    sizes: dict[int, int]
    bytes: list[RankTraffic]
    floor: TrafficFloor
    note: str


def _plan(ranks: ExchangeRanks, options: PlanOptions, strategy: Strategy) -> _Planned:
    num_owners = 1 if strategy == "redundant" else ranks.num_ranks
    chunk_bytes = _coarse_enough(ranks, options, num_owners)
    is_crowd = ranks.num_ranks > MOST_RANKS_IN_FULL
    plan = plan_step(
        ranks.specs,
        num_ranks=ranks.num_ranks,
        itemsize=options.wire_itemsize,
        chunk_bytes=chunk_bytes,
        strategy=strategy,
        replica_of=ranks.replica_of,
        keep_idle=not is_crowd,
    )
    program, sizes = with_adamw(plan.program, ranks.adamw_bytes), dict.fromkeys(plan.program, 1)
    if is_crowd:
        program, sizes = merge_equal_ranks(program)
    counted = {"itemsize": options.wire_itemsize, "replica_of": ranks.replica_of}
    return _Planned(
        plan=plan,
        program=program,
        sizes=sizes,
        bytes=traffic(plan.owners, ranks.specs, **counted),
        floor=traffic_floor(plan.owners, ranks.specs, **counted),
        note=_coarse_note(chunk_bytes, options),
    )


def _outcome(name: str, ranks: ExchangeRanks, planned: _Planned, options: PlanOptions) -> Outcome:
    issued = _issue(ranks, planned, options)
    if ranks.num_ranks <= MOST_RANKS_IN_FULL:
        check_step(issued, [planned.plan])
    return Outcome(
        name=name,
        ranks=ranks,
        owners=planned.plan.owners,
        chunk_bytes=_chunk_bytes(ranks, planned.plan, options),
        loads=planned.plan.flops,
        bytes=planned.bytes,
        floor=planned.floor,
        timeline=simulate(branch(issued, ALL_IN_STEP), options.cost),
        early=estimate_prefetch([rank_seconds(ops, options.cost) for ops in planned.program.values()]),
        sizes=planned.sizes,
        note=planned.note,
    )


def _issue(ranks: ExchangeRanks, planned: _Planned, options: PlanOptions) -> Program:
    try:
        return step_program(planned.program, look_ahead=options.look_ahead, memory_bytes=options.buffer_bytes)
    except ValueError as error:
        largest = max(planned.plan.buckets, key=lambda chunk: sum(ranks.specs[matrix].numel for matrix in chunk))
        least = 1 if len(planned.plan.owners[largest[0]]) > 1 else ranks.num_ranks
        if len(largest) > least:
            raise
        raise ValueError(
            f"{error}. A chunk has at least {least} matrices (one for each rank that shares it), and the largest one "
            "has no more, so a smaller --chunk-bytes does not help here; divide fused weights with --fused"
        ) from error


def _chunk_bytes(ranks: ExchangeRanks, plan: MuonPlan, options: PlanOptions) -> tuple[int, ...]:
    """Whole matrices of each chunk, per rank that owns some of it; where all own all, all of the chunk."""
    found: list[int] = []
    for chunk in plan.buckets:
        numel = sum(ranks.specs[matrix].numel for matrix in chunk)
        num_owners = len({plan.owners[matrix][0] for matrix in chunk})
        found.append(numel * options.wire_itemsize // num_owners)
    return tuple(found)


def _redundant(ranks: ExchangeRanks, options: PlanOptions) -> Outcome:
    """Every rank gathers and orthogonalizes everything; the next gather runs meanwhile."""
    if ranks.num_ranks <= MOST_RANKS_IN_FULL:
        return _outcome("redundant", ranks, _plan(ranks, options, "redundant"), options)
    planned = _plan(_first_and_rest(ranks), options, "redundant")
    first = replace(planned, program={0: [_alone(op) for op in planned.program[0]]}, sizes={0: ranks.num_ranks})
    outcome = _outcome("redundant", ranks, first, options)
    note = f"rank 0 of {ranks.num_ranks} was simulated, all do the same; {outcome.note}".removesuffix("; ")
    return replace(
        outcome,
        loads=outcome.loads[:1] * ranks.num_ranks,
        bytes=outcome.bytes[:1] * ranks.num_ranks,
        note=note,
    )


def _first_and_rest(ranks: ExchangeRanks) -> ExchangeRanks:
    """Rank 0, and all others as one, who have what it does not have."""
    is_replicated = len(set(ranks.replica_of)) > 1
    known: dict[tuple[int, int], tuple[int, int]] = {}
    specs: list[MatrixSpec] = []
    for spec in ranks.specs:
        first = spec.held[0]
        key = (first, spec.numel if is_replicated else spec.numel - first)
        specs.append(replace(spec, held=known.setdefault(key, key)))
    return ExchangeRanks(
        specs=tuple(specs), replica_of=(0, 1) if is_replicated else (0, 0), adamw_bytes=ranks.adamw_bytes[:2]
    )


def _alone(op: Op) -> Op:
    return replace(op, group=(op.rank,)) if op.group else op


def _coarse_enough(ranks: ExchangeRanks, options: PlanOptions, num_owners: int) -> int:
    """Bytes of a chunk that keep the number of ops within bounds: plans of 45,000 matrices have too many otherwise."""
    most_chunks = max(8, _MOST_OPS // (_OPS_PER_CHUNK * ranks.num_ranks))
    # Matrices that lie on one rank alone are in chunks of that rank, all others in chunks of all owners.
    holders = _sole_holders(ranks.specs)
    matrices: dict[int | None, int] = {}
    elements: dict[int | None, int] = {}
    for spec in ranks.specs:
        holder = holders[id(spec.held)]
        matrices[holder] = matrices.get(holder, 0) + 1
        elements[holder] = elements.get(holder, 0) + spec.numel
    least = options.chunk_bytes
    for holder, number in matrices.items():
        owners = num_owners if holder is None else 1
        if number > most_chunks * owners:
            least = max(least, math.ceil(elements[holder] * options.wire_itemsize / (most_chunks * owners)))
    return least


def _sole_holders(specs: Sequence[MatrixSpec]) -> dict[int, int | None]:
    """Identity of a ``held`` -> the rank that has all of these matrices while no other has any, or None."""
    found: dict[int, int | None] = {}
    for spec in specs:
        if id(spec.held) not in found:
            is_sole = max(spec.held) == sum(spec.held) == spec.numel
            found[id(spec.held)] = spec.held.index(spec.numel) if is_sole else None
    return found


def _coarse_note(chunk_bytes: int, options: PlanOptions) -> str:
    if chunk_bytes == options.chunk_bytes:
        return ""
    return f"planned with chunks of {chunk_bytes / 2**20:,.0f} MiB per rank: smaller ones are too many to simulate"
