"""Time of one training step with each pipeline schedule, as ratios in one run, and what the simulator predicts.

    python benchmarks/pipeline.py --ranks 2 --microbatches 8

Starts gloo processes on this machine (one thread each), which train a stack of equal blocks with ParallelMuon, one
stage or two on each rank, and takes turns between the schedules. The seconds of forward, of both parts of backward and
of a message are measured in the same run, and go to the simulator. The second table has the optimizer step in the
bubble, behind a barrier of all ranks, and behind a norm over all stages.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from lightning_muon import ModeOptions, Options
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.monitor.timeline import TimelineRecorder
from lightning_muon.schedule.pipeline import Pipeline, StageCosts, build_program, make_order
from lightning_muon.schedule.simulate import simulate

SCHEDULES = (
    *("gpipe", "1f1b", "zb_h1", "zb_1p", "zb_2p"),
    *("interleaved_1f1b", "zb_v", "v_half", "v_min", "dual_pipe_v"),
)
NUM_BLOCKS = 8  # For each rank.


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape."""
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Stack(nn.Sequential):
    """All blocks."""

    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        """Squared errors."""
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
        model = Stack(*(Block(arguments.width) for _ in range(NUM_BLOCKS * size)))
        meshes = options.mesh_sizes.make("cpu", num_nodes=1, num_processes=size)
        self.engine = TrainingEngine(
            model, options, meshes, mode_options=ModeOptions(), info=lambda _: None, warn=lambda _: None
        )
        self.engine.shard(torch.device("cpu"))
        (self.optimizer,) = self.engine.attach([torch.optim.AdamW(model.parameters(), lr=1e-3)], source="benchmark")
        assert self.engine.pipeline is not None
        self.runtime = self.engine.pipeline
        self.pipeline = Pipeline(
            num_ranks=size, num_microbatches=arguments.microbatches, stages_per_rank=options.stages_per_rank
        )

    def pass_batch(self, batch: tuple[Tensor, Tensor]) -> None:
        """Forward, backward and the sum of gradients."""
        self.optimizer.zero_grad()
        self.engine.run_pipeline(batch)

    def step(self) -> None:
        """The optimizer's."""
        self.engine.step(self.optimizer, lambda optimizer: optimizer.step())

    def step_behind_barrier(self) -> None:
        """As if the step had to wait for all stages."""
        dist.barrier()
        self.step()

    def step_behind_norm(self) -> None:
        """With clipping by one norm, which is not reached."""
        self.engine.clip_by_norm(list(self.engine.module.parameters()), 1e9)
        self.step()

    def seconds_by_kind(self, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
        """Of one pass: median seconds of an op of each kind on this rank, over all its stages."""
        self.runtime.recorder = recorder = TimelineRecorder(torch.device("cpu"))
        self.pass_batch(batch)
        self.runtime.recorder = None
        found: dict[str, list[float]] = {}
        for span in recorder.spans():
            if span.op.kind in ("I", "W") and span.op.items[0] == 0:
                continue  # The first stage has nothing to hand back: its second part is the whole backward.
            found.setdefault(span.op.kind, []).append(span.end - span.start)
        return {kind: statistics.median(values) for kind, values in found.items()}

    def predicted(self, costs: StageCosts) -> float:
        """Seconds of a pass."""
        order = make_order(self.name, self.pipeline)
        return simulate(build_program(order, self.pipeline), costs).makespan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="of a micro-batch, each a vector")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(arguments, folder), nprocs=arguments.ranks)
        print(Path(folder, "result.txt").read_text())


def worker(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=arguments.ranks)
    rows = arguments.rows * arguments.microbatches
    batch = (torch.randn(rows, arguments.width), torch.randn(rows, arguments.width))
    for tensor in batch:
        dist.broadcast(tensor, 0)
    contenders = [Contender(name, arguments) for name in dict.fromkeys(("1f1b", *arguments.schedules))]
    passes: dict[str, list[float]] = {}
    steps: dict[str, list[float]] = {}
    kinds: dict[str, list[float]] = {}
    for number in range(arguments.rounds + 1):
        for contender in contenders:
            parts = contender.seconds_by_kind(batch)
            pass_seconds = timed(lambda contender=contender: contender.pass_batch(batch))
            contender.step()
            if number:  # The first round warms up.
                passes.setdefault(contender.name, []).append(pass_seconds)
                for kind, value in parts.items():
                    # A stage of a rank that has several is smaller.
                    kinds.setdefault(kind, []).append(value * contender.pipeline.stages_per_rank)
        first = contenders[0]
        for name in ("step", "step_behind_barrier", "step_behind_norm"):
            seconds = timed(lambda name=name, first=first: (first.pass_batch(batch), getattr(first, name)()))
            if number:
                steps.setdefault(name, []).append(seconds)
    message = message_seconds(arguments)
    medians: list[dict[str, float]] = [{}] * arguments.ranks
    dist.all_gather_object(medians, {kind: statistics.median(values) for kind, values in kinds.items()})
    if rank == 0:
        costs = {
            kind: statistics.fmean(each[kind] for each in medians if kind in each) for kind in ("F", "B", "I", "W")
        }
        Path(folder, "result.txt").write_text(report(contenders, passes, steps, costs, message))
    dist.barrier()
    for contender in contenders:
        contender.engine.close()
    dist.destroy_process_group()


def timed(action: Callable[[], object]) -> float:
    """Seconds from the start on all ranks to the end on the last one."""
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def message_seconds(arguments: argparse.Namespace) -> float:
    """Of an activation from the first rank to the second, half of there and back."""
    rank, tensor = dist.get_rank(), torch.zeros(arguments.rows, arguments.width)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(20):
        if rank < 2:
            first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
            first(tensor, 1 - rank)
            second(tensor, 1 - rank)
    seconds = [(time.perf_counter() - start) / 40]
    dist.broadcast_object_list(seconds, 0)
    return seconds[0]


def report(
    contenders: list[Contender],
    passes: dict[str, list[float]],
    steps: dict[str, list[float]],
    seconds: dict[str, float],
    message: float,
) -> str:
    """Two tables."""
    baseline = statistics.median(passes["1f1b"])
    lines = [
        "measured: "
        + ", ".join(f"{kind} {1e3 * value:.2f} ms" for kind, value in seconds.items())
        + f", a message {1e3 * message:.2f} ms",
        "",
        "| schedule | ms | of 1f1b | predicted ms | measured / predicted |",
        "| --- | --- | --- | --- | --- |",
    ]
    for contender in contenders:
        measured, per_rank = statistics.median(passes[contender.name]), contender.pipeline.stages_per_rank
        is_split = "I" in {node.kind for node in make_order(contender.name, contender.pipeline)[0]}
        # The whole backward, and the sum of its parts, are measured where they run.
        parts = (seconds["I"], seconds["W"]) if is_split else (seconds["B"] / 2, seconds["B"] / 2)
        costs = StageCosts(
            forward=seconds["F"] / per_rank,
            backward_input=parts[0] / per_rank,
            backward_weight=parts[1] / per_rank,
            communication=message,
        )
        predicted = contender.predicted(costs)
        lines.append(
            f"| {contender.name} | {1e3 * measured:.1f} | {measured / baseline:.3f} | {1e3 * predicted:.1f} | "
            f"{measured / predicted:.3f} |"
        )
    plain = statistics.median(steps["step_behind_barrier"])
    names = {"step": "in the bubble", "step_behind_barrier": "behind a barrier", "step_behind_norm": "behind one norm"}
    lines += ["", "| Muon's step (1f1b) | ms of pass and step | of that behind a barrier |", "| --- | --- | --- |"]
    lines += [
        f"| {label} | {1e3 * statistics.median(steps[name]):.1f} | {statistics.median(steps[name]) / plain:.3f} |"
        for name, label in names.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
