"""The strategies that ``lightning-muon plan`` compares: their owners, bytes and predicted timelines.

The pieces that each rank holds, and the exchange groups, come from the optimizer's own builder
(:mod:`lightning_muon.params.exchange`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.config import Assignment, Dedupe, MuonConfig, from_arguments
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulzOptions
from lightning_muon.params.exchange import (
    ExchangeRanks,
    MeshRanks,
    ParameterToPlan,
    PlacedMatrix,
    PlanOptions,
    group_matrices,
)
from lightning_muon.params.layout import OwnedBy, held_boxes
from lightning_muon.schedule.assign import MatrixSpec, count_elements
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.muon import ADAMW_TENSORS, STATE_ITEMSIZE, MuonPlan, plan_step
from lightning_muon.schedule.program import STEP_KINDS, Op, OpKind
from lightning_muon.schedule.shapes import ModelShapes
from lightning_muon.schedule.simulate import Timeline, merge_equal_ranks, simulate
from lightning_muon.schedule.step import prefetch, scatter_buffers_for, step_program
from lightning_muon.schedule.validate import check_step

PIPELINE = "lpt+pipeline"
GRID = "lpt+pipeline, owner grid"
# Programs of more ranks are not validated.
MOST_RANKS_IN_FULL = 16
# Limits of simulated ops, and of ranks times buckets that are counted; larger buckets keep within them.
_MOST_OPS, _MOST_COUNTS = 20_000, 1_000_000
_OPS_PER_BUCKET = len(STEP_KINDS)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A step that is planned."""

    model: ModelShapes
    mesh: Mesh
    config: MuonConfig
    wire_itemsize: int  # Bytes of an element that is sent.
    cost: CostModel
    machine: str = "reference"  # Where the rates come from.
    is_cpu: bool = False  # Whether the ranks are on CPUs.
    owners: Mapping[str, int] = field(default_factory=dict[str, int])  # Matrix that is whole on a shard rank -> rank.

    def strategies(self) -> dict[str, MuonConfig]:
        """The config with the assignment, overlap and dedupe of each strategy.

        With several replicas of several shards each, every replica repeats the work, except with the last strategy,
        whose owners may be anywhere on the grid.
        """
        alone = self.mesh.shard == 1  # Then each replica is one rank, and work can be shared only between replicas.
        pipeline = replace(self.config, assignment="lpt", overlap="step", dedupe="always" if alone else "never")
        serial = replace(pipeline, overlap="off")
        found = {
            "redundant": replace(pipeline, assignment="redundant"),
            "round_robin": replace(serial, assignment="round_robin"),
            "lpt": serial,
            PIPELINE: pipeline,
        }
        return found if alone or self.mesh.replicate == 1 else {**found, GRID: replace(pipeline, dedupe="always")}

    def exchange_groups(self, dedupe: Dedupe) -> list[tuple[ExchangeRanks, list[PlacedMatrix]]]:
        """The exchange groups that the optimizer makes of the trainable matrices."""
        ranks, newton_schulz = MeshRanks.of_shape(self.mesh), NewtonSchulzOptions.of(vars(self.config))
        parameters = [
            ParameterToPlan(
                each,
                each.shape,
                ranks,
                (Replicate(), OwnedBy(self.owners[each.name]) if each.name in self.owners else Shard(each.shard_dim)),
                newton_schulz,
                normuon=self.config.normuon,
            )
            for each in self.model.parameters
            if each.kind != "elementwise" and not each.frozen
        ]
        device_type = "cpu" if self.is_cpu else "cuda"
        dtype = torch.float32 if self.config.compute_dtype == "float32" else torch.bfloat16
        arithmetic = Arithmetic(device_type, dtype)
        known = {"dedupe": dedupe, "itemsize": self.wire_itemsize, "arithmetic": arithmetic}
        return group_matrices(parameters, from_arguments(PlanOptions, vars(self.config) | known))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one strategy. If replicas repeat the work, ranks are those of one replica."""

    name: str
    specs: Sequence[MatrixSpec]
    plan: MuonPlan
    timeline: Timeline
    numbers: dict[str, Any]  # For JSON: seconds, bytes, FLOPs and shares.


def compare_strategies(
    setting: Setting, names: Collection[str] | None = None, *, validates: bool = True
) -> list[Outcome]:
    """Plan all strategies on one model and mesh, or those of these names; ``validates`` programs of few ranks."""
    ranks = cache(lambda dedupe: _Ranks(setting, dedupe))
    return [
        ranks(each.dedupe).outcome(name, each, validates=validates)
        for name, each in setting.strategies().items()
        if names is None or name in names
    ]


class _Ranks:
    """The matrices of a model on the ranks that exchange them, with weights sharded as by FSDP2."""

    def __init__(self, setting: Setting, dedupe: Dedupe) -> None:
        groups = setting.exchange_groups(dedupe)
        if not groups:
            raise ValueError(f"{setting.model.name} has no matrices that are trained, so there is nothing to plan")
        ((ranks, placed),) = groups
        self._setting, self._itemsize = setting, setting.wire_itemsize
        self.specs = [each.spec for each in placed]
        self.num_ranks = ranks.size
        self._adamw = [
            Op(kind=OpKind.ADAMW, key="0", rank=rank, bytes=size)
            for rank, size in enumerate(_adamw_bytes(setting.model, ranks))
        ]
        self._planned = cache(self._make_plan)

    def _make_plan(self, assignment: Assignment) -> tuple[MuonPlan, dict[str, Any]]:
        """Owners, buckets and serial program, and their numbers."""
        chunk_bytes, note = self._chunk_bytes(assignment), ""
        if chunk_bytes != self._setting.config.chunk_bytes:
            size = f"{chunk_bytes / 2**20:,.0f} MiB"
            note = f"planned with buckets of {size} per rank: smaller ones are too many to simulate"
        plan = plan_step(
            self.specs,
            itemsize=self._itemsize,
            chunk_bytes=chunk_bytes,
            strategy=assignment,
            ranks=self._listed(assignment),
        )
        return plan, {**self._plan_numbers(plan), "bytes": self._moved(plan), "note": note}

    def _listed(self, assignment: Assignment) -> Sequence[int]:
        """The ranks whose ops are made: if all of many ranks do the same, only the first one."""
        return range(1 if assignment == "redundant" and self.num_ranks > MOST_RANKS_IN_FULL else self.num_ranks)

    def _chunk_bytes(self, assignment: Assignment) -> int:
        """Bucket size that keeps the number of ops within bounds: plans of 45,000 matrices would have too many."""
        most_ops = _MOST_OPS // (_OPS_PER_BUCKET * len(self._listed(assignment)))
        most_buckets = max(8, min(most_ops, _MOST_COUNTS // self.num_ranks))
        # Matrices that lie on one rank alone are in buckets of that rank, all others in buckets of all owners.
        numels: defaultdict[int | None, list[int]] = defaultdict(list)
        for spec in self.specs:
            numels[spec.shards.sole_holder].append(spec.numel)
        chunk_bytes = self._setting.config.chunk_bytes
        for holder, found in numels.items():
            num_owners = 1 if assignment == "redundant" or holder is not None else self.num_ranks
            if len(found) > most_buckets * num_owners:
                chunk_bytes = max(chunk_bytes, math.ceil(sum(found) * self._itemsize / (most_buckets * num_owners)))
        return chunk_bytes

    def outcome(self, name: str, config: MuonConfig, *, validates: bool) -> Outcome:
        """Plan and simulate a strategy."""
        (plan, numbers), cost = self._planned(config.assignment), self._setting.cost
        look_ahead = 0 if config.overlap == "off" else config.look_ahead
        program = {rank: [*ops, self._adamw[rank]] for rank, ops in plan.program.items()}
        if validates and self.num_ranks <= MOST_RANKS_IN_FULL:
            check_step(step_program(program, look_ahead=look_ahead), [plan])
        program, like = merge_equal_ranks(program)
        # The part of `step_program` that runs if all gradients are there.
        simulated = simulate(prefetch(program, look_ahead), cost)
        timeline = Timeline({rank: simulated.spans[first] for rank, first in like.items()})
        most_expensive = max(self.specs, key=lambda spec: spec.flops)
        short, long = sorted((most_expensive.rows, most_expensive.cols))
        numbers = {
            "makespan_seconds": timeline.makespan,
            "idle": timeline.idle,
            "hidden": timeline.hidden,
            "peak_buffer_bytes": timeline.peak_bytes,
            # Of the most expensive matrix, in 16 bits: two l x s iterates and two s x s products.
            "newton_schulz_bytes": 2 * (2 * long * short + 2 * short * short),
            **self._step_memory(plan, look_ahead),
            **numbers,
        }
        return Outcome(name=name, specs=self.specs, plan=plan, timeline=timeline, numbers=numbers)

    def _step_memory(self, plan: MuonPlan, look_ahead: int) -> dict[str, int]:
        """Most bytes on a rank: of wire buffers, which stay from step to step, and of a running op.

        Newton-Schulz has its input, two iterates and two products of the short side; momentum has its look-ahead in
        float32.
        """
        itemsize = 4 if self._setting.config.compute_dtype == "float32" else 2
        lines = {
            OpKind.MOMENTUM: max(1, look_ahead),
            OpKind.GATHER: max(1, look_ahead),
            OpKind.NEWTON_SCHULZ: scatter_buffers_for(look_ahead),
            OpKind.SCATTER: scatter_buffers_for(look_ahead),
        }
        kept, working = 0, 0
        for ops in plan.program.values():
            buffers: dict[tuple[str, int], int] = {}
            for op in ops:
                if op.kind in lines:
                    slot = op.kind, int(op.key) % lines[op.kind]
                    buffers[slot] = max(buffers.get(slot, 0), op.memory)
                if op.kind == OpKind.MOMENTUM:
                    working = max(working, (op.bytes - op.memory) // 3)
                elif op.kind == OpKind.NEWTON_SCHULZ:
                    sides = [sorted((self.specs[item].rows, self.specs[item].cols)) for item in op.items]
                    working = max(working, itemsize * sum(3 * short * long + 2 * short**2 for short, long in sides))
            kept = max(kept, sum(buffers.values()))
        return {"kept_buffer_bytes": kept, "working_bytes": working}

    def _plan_numbers(self, plan: MuonPlan) -> dict[str, Any]:
        """Numbers of buckets, load and owners."""
        # Bytes of whole matrices of each bucket, per rank that owns some of it; all of the bucket if all own all.
        bucket_bytes = [
            sum(self.specs[i].numel for i in bucket) * self._itemsize // len({plan.owners[i][0] for i in bucket})
            for bucket in plan.buckets
        ]
        resident: Counter[int] = Counter()  # Loads that cannot move to another rank.
        for spec in self.specs:
            if spec.shards.sole_holder is not None:
                resident[spec.shards.sole_holder] += spec.flops
        flops = [spec.flops for spec in self.specs]
        # Least possible load of the busiest rank.
        bound = max(sum(flops) / self.num_ranks, *flops, *resident.values())
        is_redundant = any(len(owners) > 1 for owners in plan.owners)
        return {
            "num_buckets": len(plan.buckets),
            "bucket_bytes": {"mean": sum(bucket_bytes) / len(bucket_bytes), "max": max(bucket_bytes)},
            "load": {
                "bound_flops": bound,
                "max_over_bound": max(plan.flops) / bound,
                "ranks_without_matrix": sum(not load for load in plan.flops),
                "flops_of_ranks": list(plan.flops),
            },
            "owners": "all ranks" if is_redundant else [owner for (owner,) in plan.owners],
        }

    def _moved(self, plan: MuonPlan) -> list[dict[str, Any]]:
        """Bytes in each direction over each axis that has any; ``most`` is that of the busiest rank."""
        moved = count_elements(dict(enumerate(plan.owners)), self.specs)
        return [
            {
                "direction": direction,
                "axis": axis,
                "most": max(*sent, *received) * self._itemsize,
                "total": sum(received) * self._itemsize,
            }
            for direction, axis, sent, received in (
                ("gather", "within a replica", moved.gather_sent, moved.gather_received),
                ("scatter", "within a replica", moved.scatter_sent[0], moved.scatter_received[0]),
                ("scatter", "between replicas", moved.scatter_sent[1], moved.scatter_received[1]),
            )
            if any(received)
        ]


def _adamw_bytes(model: ModelShapes, ranks: ExchangeRanks) -> list[int]:
    """Memory traffic of AdamW on each rank."""
    total = [0] * ranks.size
    elementwise = [each for each in model.parameters if each.kind == "elementwise" and not each.frozen]
    tensors = Counter((each.shape or (1,), each.shard_dim) for each in elementwise)
    for (shape, dim), count in tensors.items():
        boxes = held_boxes(shape, ranks.mesh.shape, (Replicate(), Shard(dim)), ranks.coordinates)
        for rank, box in enumerate(boxes):
            total[rank] += ADAMW_TENSORS * STATE_ITEMSIZE * box.numel * count
    return total


def choice_of(setting: Setting) -> dict[str, Any]:
    """Options of a config on owners and transfers, and the row of the table that is the same, for JSON."""
    config, mesh = setting.config, setting.mesh
    groups = setting.exchange_groups(config.dedupe)
    num_matrices, num_shared = sum(len(placed) for _, placed in groups), None
    if mesh.replicate > 1:  # Matrices with one owner for all replicas.
        num_shared = sum(len(placed) for ranks, placed in groups if any(ranks.replica_of))
    asked = (config.assignment, config.overlap == "off", {0: "never", num_matrices: "always"}.get(num_shared or 0))
    row = None
    for name, each in setting.strategies().items():
        dedupe = asked[-1] if num_shared is None else each.dedupe
        if (each.assignment, each.overlap == "off", dedupe) == asked:
            row = name
    if num_shared == 0 and mesh.shard == 1:
        row = "redundant"  # Without sharing each replica computes everything; in the other rows they share.
    said = {key: getattr(config, key) for key in ("assignment", "overlap", "dedupe")}
    return {**said, "num_matrices": num_matrices, "num_shared": num_shared, "row": row}
