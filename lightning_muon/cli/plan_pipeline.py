"""``lightning-muon plan --pipeline``: all pipeline schedules side by side, with their bubble and memory."""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_muon.cli.table import count, positive, table
from lightning_muon.schedule.draw import draw_timelines
from lightning_muon.schedule.pipeline import (
    SCHEDULES,
    Pipeline,
    StageCosts,
    add_optimizer,
    add_reduce_grad,
    build_program,
    make_order,
    peak_activations,
    validate_pipeline,
)
from lightning_muon.schedule.simulate import Timeline, simulate

_STAGES_PER_RANK = (1, 2)
_COSTS = ("forward", "backward_input", "backward_weight", "communication", "reduce_grad", "optimizer")
_LEGEND = (
    "step: seconds, as of --stage-costs; bubble: idle share of the rank that works longest; memory: the most "
    "activations that a rank holds, in micro-batches of all its layers"
)
_MICROBATCHES_HELP = (
    "micro-batches of a step, for --pipeline (4 times its ranks), and for pipelines among --ranks and --splits (two "
    "numbers are tried)"
)
_COSTS_HELP = (
    "seconds of one micro-batch in all layers of a rank: forward, backward of inputs, backward of weights, one "
    "message; and once per step, if there are more: sum of the gradients, optimizer (1,1,1,0)"
)


@dataclass(frozen=True)
class PlannedSchedule:
    """A simulated schedule. Memory is in micro-batches of all layers of a rank."""

    name: str
    stages_per_rank: int
    timeline: Timeline
    memory: float

    @property
    def title(self) -> str:
        """Title of a picture."""
        return f"{self.name}, {self.stages_per_rank} stage{'s' * (self.stages_per_rank > 1)} per rank"

    def to_dict(self) -> dict[str, Any]:
        """The schedule as a dict for JSON."""
        return {
            "schedule": self.name,
            "stages_per_rank": self.stages_per_rank,
            "step": self.timeline.makespan,
            "bubble": self.timeline.bubble,
            "memory": self.memory,
        }


def run(arguments: Namespace, console: Console) -> None:
    """Plan, draw pictures if asked to, and print a table or JSON."""
    schedules = plan_pipeline(arguments)
    title = f"pipeline of {arguments.pipeline} ranks, {_num_microbatches(arguments)} micro-batches"
    for path in arguments.draw:
        draw_timelines({each.title: each.timeline for each in schedules}, path, title=title)
    if arguments.json:
        console.print(json.dumps([each.to_dict() for each in schedules]), soft_wrap=True)
        return
    console.print(title, schedules_table(schedules), _LEGEND, sep="\n")


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--microbatches", metavar="M", type=count, help=_MICROBATCHES_HELP)
    add("--stage-costs", metavar="F,I,W,C", type=_costs, help=_COSTS_HELP)
    add(
        "--memory-limit",
        metavar="X",
        type=positive,
        help="micro-batches of all its layers that a rank of the pipeline can hold",
    )


def plan_pipeline(arguments: Namespace) -> list[PlannedSchedule]:
    """All registered schedules that take these sizes and keep to the memory limit, the fastest first."""
    found: list[PlannedSchedule] = []
    refused: list[str] = []
    for stages_per_rank in _STAGES_PER_RANK:
        given: StageCosts = arguments.stage_costs or StageCosts()
        pipeline = Pipeline(
            num_ranks=arguments.pipeline,
            num_microbatches=_num_microbatches(arguments),
            stages_per_rank=stages_per_rank,
            memory_limit=(arguments.memory_limit or math.inf) * stages_per_rank,
            # A rank has the same layers, whatever the number of its stages.
            costs=replace(
                given, **{name: getattr(given, name) / stages_per_rank for name in _COSTS if name != "communication"}
            ),
        )
        for name in SCHEDULES:
            try:
                order = make_order(name, pipeline)
            except ValueError as error:
                refused.append(f"{name}: {error}")
                continue
            program = add_optimizer(add_reduce_grad(build_program(order, pipeline)))
            validate_pipeline(program, pipeline)
            memory = max(map(peak_activations, order)) / stages_per_rank
            found.append(PlannedSchedule(name, stages_per_rank, simulate(program, pipeline.costs), memory))
    if not found:
        raise ValueError("no schedule takes these sizes; " + "; ".join(refused))
    return sorted(found, key=lambda each: (each.timeline.makespan, each.memory))


def schedules_table(schedules: list[PlannedSchedule]) -> Table:
    """A table with one row for each schedule, compared with 1F1B if it is among them, else with the first."""
    plain = next((each for each in schedules if each.name == "1f1b"), schedules[0])
    columns = {"schedule": "", "stages per rank": "d", "step": ".2f", f"of {plain.name}": ".3f"}
    return table(
        columns | {"bubble": ".1%", "memory": ".2f"},
        [
            (
                each.name,
                each.stages_per_rank,
                each.timeline.makespan,
                each.timeline.makespan / plain.timeline.makespan,
                each.timeline.bubble,
                each.memory,
            )
            for each in schedules
        ],
    )


def _num_microbatches(arguments: Namespace) -> int:
    return arguments.microbatches or 4 * arguments.pipeline


def _costs(text: str) -> StageCosts:
    try:
        values = list(map(float, text.split(",")))
        if not 4 <= len(values) <= len(_COSTS):
            raise ValueError(f"{len(values)} numbers")
        if not any(values[:3]):
            raise ValueError("forward and backward take no time")
        return StageCosts(**dict(zip(_COSTS, values, strict=False)))
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r}: {error}; it takes 4 to 6 numbers, as 1,1,1,0") from None
