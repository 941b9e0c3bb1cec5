"""One optimizer step of ParallelMuon, planned from shapes: owners, bytes, and the simulated program.

Exchange groups come from the optimizer's own planner (:mod:`lightning_muon.schedule.exchange`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from rich.console import RenderableType
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from typing_extensions import override

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.table import table
from lightning_muon.comm.collectives import AxisGroup
from lightning_muon.config import Dedupe, MuonConfig, from_arguments
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulzOptions
from lightning_muon.params.layout import AxisPlacement, Layout, MeshMembers, RoutedParameter
from lightning_muon.params.routing import routing_rows, routing_totals
from lightning_muon.params.shapes import ModelShapes, ParameterShape
from lightning_muon.schedule.draw import rows_shown
from lightning_muon.schedule.exchange import (
    ADAMW_TENSORS,
    STATE_ITEMSIZE,
    ExchangeGroup,
    PlanOptions,
    count_elements,
    plan_exchanges,
)
from lightning_muon.schedule.program import Op, OpKind, issue_ahead
from lightning_muon.schedule.simulate import CostModel, Timeline, simulate

IN_REPLICAS, ON_ALL = "owners in each replica", "owners on all ranks"
_MIB = 2**20
_LEGEND = """idle: share of the step in which ranks do not compute. hidden: share of the transfers that run meanwhile.
buffers: most bytes of what travels, without the memory in which Newton-Schulz works."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, its optimizer and a machine."""

    model: ModelShapes
    cost: CostModel
    config: MuonConfig = field(default_factory=MuonConfig)
    is_cpu: bool = False  # Whether the ranks are on CPUs.

    @property
    def wire_itemsize(self) -> int:
        """Bytes of an element that travels."""
        dtype = self.config.wire_dtype if self.config.wire_dtype != "auto" else self.config.compute_dtype
        return 4 if dtype == "float32" else 2

    @property
    def arithmetic(self) -> Arithmetic:
        """Arithmetic of Newton-Schulz."""
        dtype = torch.float32 if self.config.compute_dtype == "float32" else torch.bfloat16
        return Arithmetic("cpu" if self.is_cpu else "cuda", dtype)

    def flops(self, rows: int, cols: int) -> int:
        """FLOPs of Newton-Schulz for one matrix."""
        return NewtonSchulzOptions.of(vars(self.config)).flops(rows, cols, self.arithmetic)


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """Owners and predicted timeline. If replicas repeat the work, ranks are those of one replica."""

    plan: ExchangeGroup
    timeline: Timeline
    itemsize: int

    def moved(self) -> Iterator[tuple[str, str, int, int]]:
        """Direction, axis, and bytes of the busiest rank and of all, where there are any."""
        found = count_elements(self.plan.matrices, self.plan.replica_of)
        for direction, axis, sent, received in (
            ("gather", "within a replica", found.gather_sent, found.gather_received),
            ("scatter", "within a replica", found.scatter_sent[0], found.scatter_received[0]),
            ("scatter", "between replicas", found.scatter_sent[1], found.scatter_received[1]),
        ):
            if any(received):
                yield direction, axis, max(*sent, *received) * self.itemsize, sum(received) * self.itemsize


def planned_steps(setting: Setting, mesh: Mesh) -> dict[str, SimulatedStep]:
    """The step with owners in each replica, and on all ranks; one of them, if that is the same."""
    ways: dict[str, Dedupe] = {IN_REPLICAS: "never", ON_ALL: "always"}
    if mesh.replicate == 1 or mesh.shard == 1:  # A replica of one rank would do everything.
        del ways[ON_ALL if mesh.replicate == 1 else IN_REPLICAS]
    return {name: _planned_step(setting, mesh, dedupe) for name, dedupe in ways.items()}


def _planned_step(setting: Setting, mesh: Mesh, dedupe: Dedupe) -> SimulatedStep:
    config, itemsize = setting.config, setting.wire_itemsize
    groups = exchange_groups(setting, mesh, dedupe, of_all_ranks=True)
    if not groups:
        raise ValueError(f"{setting.model.name} has no matrices that are trained, so there is nothing to plan")
    (plan,) = groups
    of_adamw = [each for each in setting.model.parameters if each.kind == "elementwise" and not each.frozen]
    numel = sum(math.prod(each.shape) for each in of_adamw) // mesh.shard
    program = {
        rank: [*ops, Op(kind=OpKind.ADAMW, key="0", rank=rank, bytes=ADAMW_TENSORS * STATE_ITEMSIZE * numel)]
        for rank, ops in plan.program.items()
    }
    look_ahead = 0 if config.overlap == "off" else config.look_ahead
    timeline = simulate(issue_ahead(program, look_ahead), setting.cost)
    return SimulatedStep(plan=plan, timeline=timeline, itemsize=itemsize)


class _FromShapes(Layout):
    """The layout of parameters that are not built: replicated and, as FSDP2 does, cut along one dimension."""

    def __init__(self, shapes: Mapping[nn.Parameter, ParameterShape]) -> None:
        super().__init__()
        self._shard_dims: dict[Tensor, int] = {parameter: each.shard_dim for parameter, each in shapes.items()}

    @override
    def mesh_and_placements(self, parameter: Tensor) -> tuple[None, tuple[AxisPlacement, ...]]:
        return None, (Replicate(), Shard(self._shard_dims[parameter]))


def exchange_groups(setting: Setting, mesh: Mesh, dedupe: Dedupe, *, of_all_ranks: bool = False) -> list[ExchangeGroup]:
    """The exchange groups that the optimizer makes of the trained matrices; without processes."""
    trained = [each for each in setting.model.parameters if each.kind != "elementwise" and not each.frozen]
    shapes = {nn.Parameter(torch.empty(each.shape, device="meta")): each for each in trained}
    group, layout = vars(setting.config), _FromShapes(shapes)
    parameters = [RoutedParameter(tensor, group, route, layout) for tensor, route in shapes.items()]
    axes = AxisGroup(None, 0, tuple(product(range(mesh.replicate), range(mesh.shard))))
    known = {"dedupe": dedupe, "itemsize": setting.wire_itemsize, "arithmetic": setting.arithmetic}
    options = from_arguments(PlanOptions, group | known)
    return plan_exchanges(
        parameters, [MeshMembers(None, axes, axes, tuple(shapes))], options, of_all_ranks=of_all_ranks
    )


def report(model: ModelShapes, steps: Mapping[str, SimulatedStep]) -> Iterator[tuple[str, list[RenderableType]]]:
    """Title and content of each section."""
    rows = [(each, each.shape, each.frozen) for each in model.parameters]
    header, *lines = routing_rows(rows)
    yield "Parameters", [table(dict.fromkeys(header, ""), lines), "", *routing_totals(rows)]
    name, last = list(steps.items())[-1]
    yield name.capitalize(), [_owners(last)]
    moved = [
        (name, direction, axis, most / _MIB, total / len(step.plan.flops) / _MIB)
        for name, step in steps.items()
        for direction, axis, most, total in step.moved()
    ]
    columns = {"way": "", "direction": "", "axis": "", "busiest MiB": ",.1f", "mean MiB": ",.1f"}
    yield "Bytes on the wire, one step", [table(columns, moved) if moved else "Nothing travels."]
    columns = {"way": "", "step ms": ",.2f", "idle": ".1%", "hidden": ".1%", "buffers MiB": ",.0f", "buckets": "d"}
    timelines = [
        (
            name,
            1e3 * step.timeline.makespan,
            step.timeline.idle,
            step.timeline.hidden,
            step.timeline.peak_bytes / _MIB,
            len(step.plan.buckets),
        )
        for name, step in steps.items()
    ]
    yield "Predicted timeline of the step, without forward and backward", [table(columns, timelines), _LEGEND]


def _owners(step: SimulatedStep) -> RenderableType:
    loads = step.plan.flops
    mean = sum(loads) / len(loads)
    rows: list[tuple[Any, ...]] = []
    for rank, label in rows_shown(step.timeline).items():
        owned = [matrix for matrix in step.plan.matrices if matrix.owner == rank]
        shapes = Counter((matrix.rows, matrix.cols) for matrix in owned)
        text = ", ".join(f"{number} x {shape}" for shape, number in shapes.most_common())
        rows.append((label.replace("\n", " "), len(owned), loads[rank] / 1e12, loads[rank] / mean, text or "nothing"))
    return table({"rank": "", "matrices": "d", "TFLOP": ".3f", "/ mean": ".3f", "shapes": ""}, rows)
