"""Time of training steps with each pipeline schedule, measured, and as the simulator predicts it.

    python -m benchmarks.pipeline

Starts gloo processes on this machine (one thread each), which train a stack of equal layers with ParallelMuon, one
stage or two on each rank, and takes turns between the schedules. A layer waits, so that it takes the same time whatever
the cores of the machine do, as one does that runs on a device of its own; messages, autograd and the runtime are the
real ones. The simulator knows these waits, and that nothing else takes time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import run_on_ranks
from benchmarks.tables import markdown, origin, parser_of
from lightning_muon import ModeOptions, Options
from lightning_muon.comm.agreement import gather
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.schedule.pipeline import Pipeline, StageCosts, build_program, make_order
from lightning_muon.schedule.simulate import simulate

SCHEDULES = ("1f1b", "gpipe", "zb_h1", "zb_1p", "zb_2p", "interleaved_1f1b", "zb_v", "v_half", "v_min")
Batch = tuple[Tensor, Tensor]


class _Waits(torch.autograd.Function):
    """Hands on; forward and backward take time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Wait(nn.Module):
    """A layer whose forward, and both parts of whose backward, take so many seconds each."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        # In the first layer nothing asks for the gradient of the input; it shall take as long as the others.
        backward_weight = self.seconds if x.requires_grad else 2 * self.seconds
        return nn.functional.linear(
            _Waits.apply(x, self.seconds, self.seconds), _Waits.apply(self.weight, 0.0, backward_weight)
        )


class Stack(nn.Sequential):
    """All layers."""

    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output - target).square().sum(), target.numel()


class Contender:
    """A model in a schedule of its own, and its optimizer."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.name = name
        size = dist.get_world_size()
        options = Options(
            pipeline_size=size, pipeline_schedule=name, pipeline_microbatches=arguments.microbatches, sharding="none"
        )
        model = Stack(*(Wait(arguments.width, 1e-3 * arguments.milliseconds) for _ in range(2 * size)))
        meshes = options.make("cpu", num_nodes=1, num_processes=size)
        self.engine = TrainingEngine(
            model, options, meshes, mode_options=ModeOptions(), info=lambda _: None, warn=lambda _: None
        )
        self.engine.shard(torch.device("cpu"))
        (self.optimizer,) = self.engine.attach([torch.optim.AdamW(model.parameters(), lr=1e-4)], source="benchmark")
        problem = Pipeline(
            num_ranks=size, num_microbatches=arguments.microbatches, stages_per_rank=options.stages_per_rank
        )
        self.program = build_program(make_order(name, problem), problem)
        # A rank has two layers, whatever the number of its stages.
        seconds = 2e-3 * arguments.milliseconds / options.stages_per_rank
        self.costs = StageCosts(forward=seconds, backward_input=seconds, backward_weight=seconds)

    def timed(self, batch: Batch, number: int) -> float:
        """Seconds of each of so many steps in a row, from the start on all ranks to the end on the last one."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(number):
            self.engine.run_pipeline(batch)
            self.engine.step(self.optimizer, lambda optimizer: optimizer.step())
            self.optimizer.zero_grad()
        return max(gather(time.perf_counter() - start, None)) / number


def main() -> None:
    # Rows of a micro-batch; milliseconds of each pass of a layer, of which a rank has two.
    numbers = {"microbatches": 8, "steps": 4, "rounds": 3, "ranks": 4, "rows": 16, "width": 64, "milliseconds": 6.0}
    parser = parser_of(__doc__, numbers)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    arguments = parser.parse_args()
    print(run_on_ranks(worker, arguments, num_ranks=arguments.ranks))
    print(origin(__spec__.name))


def worker(arguments: argparse.Namespace) -> str:
    """A table: a step alone, and steps in a row. Collective; every rank must call it."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    size = arguments.rows * arguments.microbatches, arguments.width
    batch = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
    contenders = [Contender(name, arguments) for name in dict.fromkeys(("1f1b", *arguments.schedules))]
    numbers = (1, arguments.steps)
    seconds: dict[tuple[str, int], list[float]] = {(each.name, number): [] for each in contenders for number in numbers}
    for each in contenders:
        each.timed(batch, 2)  # Warms up.
    for _ in range(arguments.rounds):
        for each in contenders:
            for number in numbers:
                seconds[each.name, number].append(each.timed(batch, number))
    for each in contenders:
        each.engine.close()
    median = {key: statistics.median(values) for key, values in seconds.items()}
    rows: list[list[str]] = []
    for each in contenders:
        rows.append([each.name])
        for number in numbers:
            measured = median[each.name, number]
            rows[-1] += [f"{1e3 * measured:.1f}", f"{measured / median['1f1b', number]:.3f}"]
        rows[-1].append(f"{median[each.name, 1] / simulate(each.program, each.costs).makespan:.3f}")
    heads = ["schedule", "one step, ms", "of 1f1b", f"{arguments.steps} steps in a row, ms each", "of 1f1b"]
    heads.append("one step, measured / predicted")
    return f"{arguments.ranks} ranks, {arguments.microbatches} micro-batches\n\n{markdown(heads, rows)}"


if __name__ == "__main__":
    main()
