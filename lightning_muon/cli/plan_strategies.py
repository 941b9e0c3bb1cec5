"""The strategies that ``lightning-muon plan`` compares: their owners, bytes and predicted timelines.

What each rank holds, and who shares owners, is what the optimizer's own builder makes of the shapes
(:mod:`lightning_muon.params.exchange`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
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
    group_matrices,
)
from lightning_muon.params.layout import held_boxes
from lightning_muon.params.routing import route_of
from lightning_muon.schedule.assign import Strategy
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.estimates import PrefetchEstimate, estimate_prefetch, rank_seconds
from lightning_muon.schedule.matrix_shards import MatrixSpec
from lightning_muon.schedule.muon import MuonPlan, plan_step
from lightning_muon.schedule.program import Op, OpKind, branch
from lightning_muon.schedule.shapes import ModelShapes
from lightning_muon.schedule.simulate import Timeline, merge_equal_ranks, simulate
from lightning_muon.schedule.step import ALL_IN_STEP, step_program
from lightning_muon.schedule.traffic import count_elements, traffic_floor
from lightning_muon.schedule.validate import check_step

PIPELINE = "lpt+pipeline"
GRID = "lpt+pipeline, owner grid"
# Programs of more ranks are not validated, and those of ranks that do the same are simulated once.
MOST_RANKS_IN_FULL = 16
# AdamW reads gradient, weight and two moments and writes the last three: 7 float32 numbers per element.
_ADAMW_BYTES = 7 * 4
# Larger buckets keep within this what is simulated, and what is counted: ranks times buckets.
_MOST_OPS, _MOST_COUNTS = 20_000, 1_000_000
_OPS_PER_BUCKET = 5


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What strategies are compared with, beside model and mesh."""

    ns_steps: int  # Newton-Schulz iterations.
    wire_itemsize: int  # Bytes of an element that travels.
    chunk_bytes: int  # Of whole matrices that an average rank owns of a bucket.
    look_ahead: int  # Buckets whose gathers may be on their way.
    buffer_bytes: int | None  # Upper bound of the buffers of a rank.
    cost: CostModel
    machine: str = "reference"  # Where the rates come from.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one strategy comes to. Where replicas repeat the work, ranks are those of one replica."""

    name: str
    specs: Sequence[MatrixSpec]
    plan: MuonPlan
    timeline: Timeline
    early: PrefetchEstimate | None  # Whether gathers during backward would pay; `None` if nothing is gathered.
    numbers: dict[str, Any]  # For JSON: seconds, bytes, FLOPs and shares.


def compare_strategies(model: ModelShapes, mesh: Mesh, options: CompareOptions) -> list[Outcome]:
    """All strategies on one model and mesh.

    With several replicas of several shards each, every replica does the same for itself, and the last strategy lets
    owners be anywhere on the grid.
    """
    alone = mesh.shard == 1  # Then replicas hold everything, and sharing among them is all there is.
    ranks = _Ranks(model, mesh, options, "always" if alone else "never")
    serial = replace(options, look_ahead=0, buffer_bytes=None)
    outcomes = [
        ranks.outcome("redundant", "redundant", options),
        ranks.outcome("round_robin", "round_robin", serial),
        ranks.outcome("lpt", "lpt", serial),
        ranks.outcome(PIPELINE, "lpt", options),
    ]
    if mesh.replicate > 1 and not alone:
        outcomes.append(_Ranks(model, mesh, options, "always").outcome(GRID, "lpt", options))
    return outcomes


class _Ranks:
    """The matrices of a model on the ranks among which they travel, as FSDP2 shards the weights."""

    def __init__(self, model: ModelShapes, mesh: Mesh, options: CompareOptions, dedupe: Dedupe) -> None:
        groups = _exchange_groups(model, mesh, options, dedupe)
        if not groups:
            raise ValueError(f"{model.name} has no matrices that are trained, so there is nothing to plan")
        ((exchange, placed),) = groups
        self.specs = [each.spec for each in placed]
        self.num_ranks = exchange.size
        self._adamw_bytes = _adamw_bytes(model, exchange)
        self._options = options
        self._plan = cache(self._make_plan)

    def _make_plan(self, strategy: Strategy) -> MuonPlan:
        """Owners, buckets and serial program."""
        itemsize, chunk_bytes = self._options.wire_itemsize, self._chunk_bytes(strategy)
        ranks = self._listed(strategy)
        return plan_step(self.specs, itemsize=itemsize, chunk_bytes=chunk_bytes, strategy=strategy, ranks=ranks)

    def _listed(self, strategy: Strategy) -> Sequence[int]:
        """The ranks whose ops are made: where all of many ranks do the same, the first one."""
        return range(1 if strategy == "redundant" and self.num_ranks > MOST_RANKS_IN_FULL else self.num_ranks)

    def _chunk_bytes(self, strategy: Strategy) -> int:
        """Large enough to keep the number of ops within bounds: plans of 45,000 matrices have too many otherwise."""
        most_ops = _MOST_OPS // (_OPS_PER_BUCKET * len(self._listed(strategy)))
        most_buckets = max(8, min(most_ops, _MOST_COUNTS // self.num_ranks))
        # Matrices that lie on one rank alone are in buckets of that rank, all others in buckets of all owners.
        numels: defaultdict[int | None, list[int]] = defaultdict(list)
        for spec in self.specs:
            numels[spec.shards.sole_holder].append(spec.numel)
        chunk_bytes = self._options.chunk_bytes
        for holder, found in numels.items():
            num_owners = 1 if strategy == "redundant" or holder is not None else self.num_ranks
            if len(found) > most_buckets * num_owners:
                least = math.ceil(sum(found) * self._options.wire_itemsize / (most_buckets * num_owners))
                chunk_bytes = max(chunk_bytes, least)
        return chunk_bytes

    def outcome(self, name: str, strategy: Strategy, options: CompareOptions) -> Outcome:
        """Plan and simulate."""
        plan = self._plan(strategy)
        adamw = [Op(kind=OpKind.ADAMW, key="0", rank=rank, bytes=size) for rank, size in enumerate(self._adamw_bytes)]
        program = {rank: [*ops, adamw[rank]] for rank, ops in plan.program.items()}
        like = {rank: rank for rank in program}
        if self.num_ranks > MOST_RANKS_IN_FULL:
            program, like = merge_equal_ranks(program)
        look_ahead = options.look_ahead
        while True:
            issued = step_program(program, look_ahead=look_ahead)
            if self.num_ranks <= MOST_RANKS_IN_FULL:
                check_step(issued, [plan])
            simulated = simulate(branch(issued, ALL_IN_STEP), options.cost)
            if options.buffer_bytes is None or simulated.peak_bytes <= options.buffer_bytes:
                break
            if look_ahead <= 1:
                raise ValueError(
                    f"a rank needs {simulated.peak_bytes} bytes of buffers with --look-ahead {look_ahead}, but "
                    f"--buffer-bytes is {options.buffer_bytes}; raise it or lower --chunk-bytes. A bucket has at least "
                    "one matrix for each rank that shares it, so divide fused weights with --fused where that does not "
                    "help"
                )
            look_ahead -= 1
        timeline = Timeline({rank: simulated.spans[first] for rank, first in like.items()})
        early = estimate_prefetch([rank_seconds(ops, options.cost) for ops in program.values()])
        notes: list[str] = []
        dearest = max(self.specs, key=lambda spec: spec.flops)
        short, long = sorted((dearest.rows, dearest.cols))
        if len(program) < len(plan.flops) and strategy == "redundant":
            notes.append(f"rank 0 of {len(plan.flops)} was simulated, all do the same")
        chunk_bytes = self._chunk_bytes(strategy)
        if chunk_bytes != options.chunk_bytes:
            size = f"{chunk_bytes / 2**20:,.0f} MiB"
            notes.append(f"planned with buckets of {size} per rank: smaller ones are too many to simulate")
        numbers = {
            "makespan_seconds": timeline.makespan,
            "idle": timeline.idle,
            "idle_of_idlest": max(each.idle for each in timeline.ranks.values()),
            "hidden": timeline.hidden,
            "exposed_seconds_of_worst": max(each.exposed_seconds for each in timeline.ranks.values()),
            "peak_buffer_bytes": timeline.peak_bytes,
            # Of the dearest matrix, in 16 bits: two l x s iterates and two s x s products.
            "newton_schulz_bytes": 2 * (2 * long * short + 2 * short * short),
            "early_gathers": None if early is None else {**asdict(early), "pay": early.pays},
            **self._plan_numbers(plan),
            # A single owner could do with less than the redundant strategy sends.
            "bytes": self._moved(plan, self._plan("lpt") if strategy == "redundant" else plan),
            "note": "; ".join(notes),
        }
        return Outcome(name=name, specs=self.specs, plan=plan, timeline=timeline, early=early, numbers=numbers)

    def _plan_numbers(self, plan: MuonPlan) -> dict[str, Any]:
        """Buckets, load and owners."""
        specs, itemsize = self.specs, self._options.wire_itemsize
        # Of whole matrices of each bucket, per rank that owns some of it; where all own all, all of the bucket.
        bucket_bytes = [
            sum(specs[i].numel for i in bucket) * itemsize // len({plan.owners[i][0] for i in bucket})
            for bucket in plan.buckets
        ]
        resident: Counter[int] = Counter()  # Loads that cannot travel.
        for spec in specs:
            if spec.shards.sole_holder is not None:
                resident[spec.shards.sole_holder] += spec.flops
        flops = [spec.flops for spec in specs]
        # Least possible load of the busiest rank.
        bound = max(sum(flops) / self.num_ranks, *flops, *resident.values())
        mean, busiest = sum(plan.flops) / len(plan.flops), max(plan.flops)
        is_redundant = any(len(owners) > 1 for owners in plan.owners)
        return {
            "num_buckets": len(plan.buckets),
            "bucket_bytes": {"mean": sum(bucket_bytes) / len(bucket_bytes), "max": max(bucket_bytes)},
            "load": {
                "max_flops": busiest,
                "mean_flops": mean,
                "bound_flops": bound,
                "max_over_mean": busiest / mean,
                "max_over_bound": busiest / bound,
                "ranks_without_matrix": sum(not load for load in plan.flops),
                "flops_of_ranks": list(plan.flops),
            },
            "owners": "all ranks" if is_redundant else [owner for (owner,) in plan.owners],
        }

    def _moved(self, plan: MuonPlan, reference: MuonPlan) -> list[dict[str, Any]]:
        """Bytes in each direction over each axis that carries any; ``most`` is of the busiest rank."""
        itemsize = self._options.wire_itemsize
        moved = count_elements(dict(enumerate(plan.owners)), self.specs)
        within, between = traffic_floor(reference.owners, self.specs)
        return [
            {
                "direction": direction,
                "axis": axis,
                "most": max(*sent, *received) * itemsize,
                "total": sum(received) * itemsize,
                "floor": floor * itemsize,
            }
            for direction, axis, sent, received, floor in (
                ("gather", "within a replica", moved.gather_sent, moved.gather_received, within),
                ("scatter", "within a replica", moved.scatter_sent[0], moved.scatter_received[0], within),
                ("scatter", "between replicas", moved.scatter_sent[1], moved.scatter_received[1], between),
            )
            if any(received)
        ]


def _exchange_groups(
    model: ModelShapes, mesh: Mesh, options: CompareOptions, dedupe: Dedupe
) -> list[tuple[ExchangeRanks, list[PlacedMatrix]]]:
    """The exchange groups that the optimizer makes of the trainable matrices."""
    ranks = MeshRanks.of_shape((mesh.replicate, mesh.shard))
    parameters = [
        ParameterToPlan(route_of(each), each.shape, ranks, (Replicate(), Shard(each.shard_dim)), options.ns_steps)
        for each in model.parameters
        if each.kind != "elementwise" and not each.frozen
    ]
    plan_options = PlanOptions(
        itemsize=options.wire_itemsize,
        device_type="cpu" if options.machine == "cpu" else "cuda",
        chunk_bytes=options.chunk_bytes,
        assignment="lpt",
        dedupe=dedupe,
        look_ahead=options.look_ahead,
        overlap="step",
    )
    return group_matrices(parameters, plan_options)


def _adamw_bytes(model: ModelShapes, ranks: ExchangeRanks) -> list[int]:
    """Memory traffic of AdamW on each rank."""
    total = [0] * ranks.size
    elementwise = [each for each in model.parameters if each.kind == "elementwise" and not each.frozen]
    tensors = Counter((each.shape or (1,), each.shard_dim) for each in elementwise)
    for (shape, dim), count in tensors.items():
        boxes = held_boxes(shape, ranks.mesh.shape, (Replicate(), Shard(dim)), ranks.coordinates)
        for rank, box in enumerate(boxes):
            total[rank] += _ADAMW_BYTES * box.numel * count
    return total


def choice_of(optimizer: MuonConfig, model: ModelShapes, mesh: Mesh, options: CompareOptions) -> dict[str, Any]:
    """What a config says of owners and transfers on this mesh, and the row of the table that is the same, for JSON."""
    groups = _exchange_groups(model, mesh, options, optimizer.dedupe)
    num_matrices, num_shared = sum(len(placed) for _, placed in groups), None
    if mesh.replicate > 1:  # Matrices with one owner for all replicas.
        num_shared = sum(len(placed) for ranks, placed in groups if ranks.spans_replicas)
    rows = {("lpt", True): "lpt", ("lpt", False): PIPELINE, ("round_robin", True): "round_robin"}
    row = {**rows, ("redundant", False): "redundant"}.get((optimizer.assignment, optimizer.overlap == "off"))
    if num_shared == 0 and mesh.shard == 1:
        row = "redundant"  # Replicas that do not share compute everything; in the other rows they share it.
    elif num_shared and num_shared < num_matrices:
        row = None
    elif num_shared and mesh.shard > 1:
        row = GRID if row == PIPELINE else None
    said = {key: getattr(optimizer, key) for key in ("assignment", "overlap", "dedupe")}
    return {**said, "num_matrices": num_matrices, "num_shared": num_shared, "row": row}
