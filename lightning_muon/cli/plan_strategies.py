"""The strategies that ``lightning-muon plan`` compares: their owners, bytes and predicted timelines.

What each rank holds, and who shares owners, is what the optimizer's own builder makes of the shapes
(:mod:`lightning_muon.params.exchange`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed.tensor import Replicate, Shard

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.config import Dedupe, MuonConfig
from lightning_muon.params.exchange import (
    ExchangeRanks,
    MeshRanks,
    ParameterToPlan,
    PlacedMatrix,
    PlanOptions,
    exchange_ranks,
    group_matrices,
    matrix_specs,
)
from lightning_muon.params.layout import held_boxes
from lightning_muon.params.routing import route_of
from lightning_muon.schedule.assign import Strategy
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.estimates import PrefetchEstimate, estimate_prefetch, rank_seconds
from lightning_muon.schedule.muon import MatrixSpec, MuonPlan, plan_step
from lightning_muon.schedule.passes import with_adamw
from lightning_muon.schedule.program import Op, Program, branch
from lightning_muon.schedule.shapes import ModelShapes
from lightning_muon.schedule.simulate import RankSummary, Timeline, merge_equal_ranks, simulate
from lightning_muon.schedule.step import ALL_IN_STEP, step_program
from lightning_muon.schedule.traffic import RankTraffic, TrafficFloor, traffic, traffic_floor
from lightning_muon.schedule.validate import check_step

PIPELINE = "lpt+pipeline"
GRID = "lpt+pipeline, owner grid"
# Of more ranks the programs are not validated, and those that do the same are simulated once.
MOST_RANKS_IN_FULL = 16
# AdamW reads gradient, weight and two moments and writes the last three: 7 float32 numbers per element.
_ADAMW_BYTES = 7 * 4
_ITEMSIZES = {"auto": 2, "bfloat16": 2, "float32": 4}
# More ops than this are simulated with larger buckets.
_MOST_OPS = 20_000
_OPS_PER_BUCKET = 5


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What strategies are compared with, beside model and mesh.

    Attributes:
        ns_steps: Newton-Schulz iterations.
        wire_itemsize: Bytes of an element that travels.
        chunk_bytes: Of whole matrices that an average rank owns of a bucket.
        look_ahead: Buckets whose gathers may be on their way.
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
class RankMatrices:
    """Matrices, and what each of the ranks among which they travel holds."""

    specs: tuple[MatrixSpec, ...]  # One for each trainable matrix, in the order of the forward pass.
    replica_of: tuple[int, ...]  # Replica of each rank.
    adamw_bytes: tuple[int, ...]  # Memory traffic of AdamW on each rank.

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.replica_of)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One strategy."""

    name: str  # For tables.
    ranks: RankMatrices  # Who takes part.
    owners: tuple[tuple[int, ...], ...]  # Owners of each matrix.
    bucket_bytes: tuple[int, ...]  # Of whole matrices of each bucket, per rank that owns some of it.
    loads: tuple[int, ...]  # Newton-Schulz FLOPs of each rank.
    bytes: list[RankTraffic]  # Of each rank.
    floor: TrafficFloor  # The least that has to travel.
    timeline: Timeline  # Of all ranks; of rank 0 where all do the same.
    early: PrefetchEstimate | None  # Whether gathers during backward would pay; `None` if nothing is gathered.
    note: str = ""  # What was simplified.

    @property
    def lower_bound(self) -> float:
        """No assignment has a smaller maximum, see :func:`lower_bound`."""
        return lower_bound(self.ranks.specs, len(self.loads))

    @property
    def num_buckets(self) -> int:
        """Number of buckets."""
        return len(self.bucket_bytes)

    @property
    def newton_schulz_bytes(self) -> int:
        """What Newton-Schulz of the dearest matrix takes in 16 bits: two l x s iterates and two s x s products."""
        dearest = max(self.ranks.specs, key=lambda spec: spec.flops)
        short, long = sorted((dearest.rows, dearest.cols))
        return 2 * (2 * long * short + 2 * short * short)

    @property
    def summaries(self) -> Collection[RankSummary]:
        """How each rank of the timeline spends the step."""
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


def compare_strategies(model: ModelShapes, mesh: Mesh, options: CompareOptions) -> list[Outcome]:
    """All strategies on one model and mesh.

    With several replicas of several shards each, every replica does the same for itself, and the last strategy lets
    owners be anywhere on the grid.

    Raises:
        ValueError: If the model has no matrices that are trained.
    """
    alone = mesh.shard == 1  # Then replicas hold everything, and sharing among them is all there is.
    ranks = _matrices(model, mesh, options, "always" if alone else "never")
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
        grid = _matrices(model, mesh, options, "always")
        outcomes.append(_outcome(GRID, grid, _plan(grid, options, "lpt"), options))
    return outcomes


def _matrices(model: ModelShapes, mesh: Mesh, options: CompareOptions, dedupe: Dedupe) -> RankMatrices:
    """What the optimizer plans for weights that FSDP2 shards, with ``dedupe="always"`` or ``"never"``."""
    groups = _exchange_groups(model, mesh, options, dedupe)
    ranks, matrices = groups[0] if groups else (exchange_ranks(_mesh_ranks(mesh), (1,), False), ())
    return RankMatrices(
        specs=matrix_specs(matrices), replica_of=ranks.replica_of, adamw_bytes=_adamw_bytes(model, ranks)
    )


def _exchange_groups(
    model: ModelShapes, mesh: Mesh, options: CompareOptions, dedupe: Dedupe
) -> list[tuple[ExchangeRanks, list[PlacedMatrix]]]:
    """The exchange groups that the optimizer makes of the trainable matrices, on CUDA."""
    ranks = _mesh_ranks(mesh)
    parameters = [
        ParameterToPlan(route_of(each), each.shape, ranks, (Replicate(), Shard(each.shard_dim)), options.ns_steps)
        for each in model.parameters
        if each.kind != "elementwise" and not each.frozen
    ]
    plan_options = PlanOptions(
        itemsize=options.wire_itemsize,
        device_type="cuda",
        chunk_bytes=options.chunk_bytes,
        assignment="lpt",
        dedupe=dedupe,
        look_ahead=options.look_ahead,
        overlap="step",
    )
    return group_matrices(parameters, plan_options)


def _mesh_ranks(mesh: Mesh) -> MeshRanks:
    return MeshRanks.of_shape((mesh.replicate, mesh.shard))


def _adamw_bytes(model: ModelShapes, ranks: ExchangeRanks) -> tuple[int, ...]:
    """Memory traffic of AdamW on each rank."""
    total = [0] * ranks.size
    elementwise = [each for each in model.parameters if each.kind == "elementwise" and not each.frozen]
    tensors = Counter((each.shape or (1,), each.shard_dim) for each in elementwise)
    for (shape, dim), count in tensors.items():
        boxes = held_boxes(shape, ranks.mesh.shape, (Replicate(), Shard(dim)), ranks.coordinates)
        for rank, box in enumerate(boxes):
            total[rank] += _ADAMW_BYTES * box.numel * count
    return tuple(total)


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """A plan before its transfers are overlapped with arithmetic."""

    plan: MuonPlan
    program: Program
    like: dict[int, int]  # Rank -> the rank of `program` that does the same.
    early: PrefetchEstimate | None
    bytes: list[RankTraffic]
    floor: TrafficFloor
    note: str


def _plan(ranks: RankMatrices, options: CompareOptions, strategy: Strategy) -> _Planned:
    num_owners = 1 if strategy == "redundant" else ranks.num_ranks
    chunk_bytes = _coarse_enough(ranks, options, num_owners)
    plan = plan_step(
        ranks.specs,
        num_ranks=ranks.num_ranks,
        itemsize=options.wire_itemsize,
        chunk_bytes=chunk_bytes,
        strategy=strategy,
        replica_of=ranks.replica_of,
        keep_idle=ranks.num_ranks <= MOST_RANKS_IN_FULL,
    )
    counted = {"itemsize": options.wire_itemsize, "replica_of": ranks.replica_of}
    program = with_adamw(plan.program, ranks.adamw_bytes)
    like = {rank: rank for rank in program}
    if ranks.num_ranks > MOST_RANKS_IN_FULL:
        program, like = merge_equal_ranks(program)
    return _Planned(
        plan=plan,
        program=program,
        like=like,
        early=estimate_prefetch([rank_seconds(ops, options.cost) for ops in program.values()]),
        bytes=traffic(plan.owners, ranks.specs, **counted),
        floor=traffic_floor(plan.owners, ranks.specs, **counted),
        note=_coarse_note(chunk_bytes, options),
    )


def _outcome(name: str, ranks: RankMatrices, planned: _Planned, options: CompareOptions) -> Outcome:
    issued = _issue(ranks, planned, options)
    if ranks.num_ranks <= MOST_RANKS_IN_FULL:
        check_step(issued, [planned.plan])
    return Outcome(
        name=name,
        ranks=ranks,
        owners=planned.plan.owners,
        bucket_bytes=_bucket_bytes(ranks, planned.plan, options),
        loads=planned.plan.flops,
        bytes=planned.bytes,
        floor=planned.floor,
        timeline=simulate(branch(issued, ALL_IN_STEP), options.cost).of_all_ranks(planned.like),
        early=planned.early,
        note=planned.note,
    )


def _issue(ranks: RankMatrices, planned: _Planned, options: CompareOptions) -> Program:
    try:
        return step_program(planned.program, look_ahead=options.look_ahead, memory_bytes=options.buffer_bytes)
    except ValueError as error:
        largest = max(planned.plan.buckets, key=lambda bucket: sum(ranks.specs[matrix].numel for matrix in bucket))
        least = 1 if len(planned.plan.owners[largest[0]]) > 1 else ranks.num_ranks
        if len(largest) > least:
            raise
        raise ValueError(
            f"{error}. A bucket has at least {least} matrices (one for each rank that shares it), and the largest one "
            "has no more, so a smaller --chunk-bytes does not help here; divide fused weights with --fused"
        ) from error


def _bucket_bytes(ranks: RankMatrices, plan: MuonPlan, options: CompareOptions) -> tuple[int, ...]:
    """Whole matrices of each bucket, per rank that owns some of it; where all own all, all of the bucket."""
    found: list[int] = []
    for bucket in plan.buckets:
        numel = sum(ranks.specs[matrix].numel for matrix in bucket)
        num_owners = len({plan.owners[matrix][0] for matrix in bucket})
        found.append(numel * options.wire_itemsize // num_owners)
    return tuple(found)


def _redundant(ranks: RankMatrices, options: CompareOptions) -> Outcome:
    """Every rank gathers and orthogonalizes everything; the next gather runs meanwhile."""
    if ranks.num_ranks <= MOST_RANKS_IN_FULL:
        return _outcome("redundant", ranks, _plan(ranks, options, "redundant"), options)
    planned = _plan(_first_and_rest(ranks), options, "redundant")
    program = {0: [_alone(op) for op in planned.program[0]]}
    early = estimate_prefetch([rank_seconds(program[0], options.cost)])
    first = replace(planned, program=program, like={0: 0}, early=early)
    outcome = _outcome("redundant", ranks, first, options)
    note = f"rank 0 of {ranks.num_ranks} was simulated, all do the same; {outcome.note}".removesuffix("; ")
    return replace(
        outcome,
        loads=outcome.loads[:1] * ranks.num_ranks,
        bytes=outcome.bytes[:1] * ranks.num_ranks,
        note=note,
    )


def _first_and_rest(ranks: RankMatrices) -> RankMatrices:
    """Rank 0, and all others as one, who have what it does not have."""
    is_replicated = len(set(ranks.replica_of)) > 1
    known: dict[tuple[int, int], tuple[int, int]] = {}
    specs: list[MatrixSpec] = []
    for spec in ranks.specs:
        first = spec.held[0]
        key = (first, spec.numel if is_replicated else spec.numel - first)
        specs.append(replace(spec, held=known.setdefault(key, key)))
    return RankMatrices(
        specs=tuple(specs), replica_of=(0, 1) if is_replicated else (0, 0), adamw_bytes=ranks.adamw_bytes[:2]
    )


def _alone(op: Op) -> Op:
    return replace(op, group=(op.rank,)) if op.group else op


def _coarse_enough(ranks: RankMatrices, options: CompareOptions, num_owners: int) -> int:
    """Bytes of a bucket that keep the number of ops within bounds: plans of 45,000 matrices have too many otherwise."""
    most_buckets = max(8, _MOST_OPS // (_OPS_PER_BUCKET * ranks.num_ranks))
    # Matrices that lie on one rank alone are in buckets of that rank, all others in buckets of all owners.
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
        if number > most_buckets * owners:
            least = max(least, math.ceil(elements[holder] * options.wire_itemsize / (most_buckets * owners)))
    return least


def _sole_holders(specs: Sequence[MatrixSpec]) -> dict[int, int | None]:
    """Identity of a ``held`` -> the rank that has all of these matrices while no other has any, or None."""
    found: dict[int, int | None] = {}
    for spec in specs:
        if id(spec.held) not in found:
            is_sole = max(spec.held) == sum(spec.held) == spec.numel
            found[id(spec.held)] = spec.held.index(spec.numel) if is_sole else None
    return found


def _coarse_note(chunk_bytes: int, options: CompareOptions) -> str:
    if chunk_bytes == options.chunk_bytes:
        return ""
    return f"planned with buckets of {chunk_bytes / 2**20:,.0f} MiB per rank: smaller ones are too many to simulate"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a config says of owners and transfers."""

    assignment: str  # Of the config.
    overlap: str  # Of the config.
    dedupe: str  # Of the config.
    num_matrices: int  # Of the model.
    num_shared: int | None  # Matrices that have one owner for all replicas; None where there are no replicas.
    row: str | None  # The strategy of the tables that is the same, or None.

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def to_text(self) -> str:
        """One or two lines."""
        shared = (
            f"dedupe={self.dedupe} (replicas share {self.num_shared} of {self.num_matrices} matrices)"
            if self.num_shared is not None
            else f"dedupe={self.dedupe} (no replicas)"
        )
        which = f"the row {self.row!r} (*)" if self.row is not None else "none of these rows"
        return f"The config has assignment={self.assignment}, overlap={self.overlap}, {shared}: {which}."


def wire_itemsize(optimizer: MuonConfig) -> int:
    """Bytes of an element that travels, on CUDA, where ``"auto"`` is bfloat16."""
    dtype = optimizer.wire_dtype if optimizer.wire_dtype != "auto" else optimizer.compute_dtype
    return _ITEMSIZES[dtype]


def choice_of(optimizer: MuonConfig, model: ModelShapes, mesh: Mesh, options: CompareOptions) -> Choice:
    """What the config runs on this mesh.

    Args:
        optimizer: Options.
        model: Shapes.
        mesh: Sizes.
        options: What the strategies were compared with.
    """
    groups = _exchange_groups(model, mesh, options, optimizer.dedupe)
    num_matrices = sum(len(matrices) for _, matrices in groups)
    num_shared = None
    if mesh.replicate > 1:
        num_shared = sum(len(matrices) for ranks, matrices in groups if ranks.spans_replicas)
    return Choice(
        assignment=optimizer.assignment,
        overlap=optimizer.overlap,
        dedupe=optimizer.dedupe,
        num_matrices=num_matrices,
        num_shared=num_shared,
        row=_row(optimizer, mesh, num_shared, num_matrices),
    )


def _row(optimizer: MuonConfig, mesh: Mesh, num_shared: int | None, num_matrices: int) -> str | None:
    is_serial = optimizer.overlap == "off"
    if num_shared is not None and mesh.shard == 1:
        # Replicas that do not share compute everything; the other rows share it.
        if num_shared == 0:
            return "redundant"
        if num_shared < num_matrices:
            return None
    elif num_shared:
        is_grid = num_shared == num_matrices and optimizer.assignment == "lpt" and not is_serial
        return GRID if is_grid else None
    if optimizer.assignment == "lpt":
        return "lpt" if is_serial else PIPELINE
    if optimizer.assignment == "round_robin":
        return "round_robin" if is_serial else None
    return None if is_serial else "redundant"
