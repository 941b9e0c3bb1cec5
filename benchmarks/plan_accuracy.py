"""How well a calibrated plan predicts a real step, on gloo processes of this machine.

    python benchmarks/plan_accuracy.py --ranks 2 4
    python benchmarks/plan_accuracy.py --ranks 1 2 4 --trainings

The first command compares optimizer steps, the second whole steps of a Llama of 12.6 million parameters in every mode
of ``lightning-muon plan --ranks``, and the memory of the rank that needs most. The plan then gets the calibration, and
the FLOP/s of forward and backward of the whole model, run on all ranks at once.

Each round calibrates (a measurement on a sample of the matrices) and then records steps of the whole model, serial and
with overlap, in the same processes. The fastest step counts, in the calibration too, because other work on the machine
only ever adds; the ratio of each round is taken by itself and the median of the rounds is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from pipeline_link import Training
from plan_splits import GIVES_MEMORY_BACK, asked_of_plan, measured_flops, peak_bytes, planned_llama

from lightning_muon.cli.plan_model import PlannedModel
from lightning_muon.cli.plan_modes import strategy_options
from lightning_muon.cli.split_rules import TRAINING_MODES, Job
from lightning_muon.cli.split_search import Way, find_splits
from lightning_muon.monitor.calibrate import Comparison, calibrate, compare, run_on_ranks
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape, read_shapes

STRATEGIES = {
    "lpt": {"assignment": "lpt", "overlap": "off"},
    "lpt+pipeline": {"assignment": "lpt", "overlap": "step"},
}
# Matrices of a transformer with 8 layers of width 384 and a gated feed-forward part, as a contrast to T5's equal sides.
GATED = ModelShapes(
    name="gated-384",
    source="",
    parameters=tuple(
        ParameterShape(name=f"{layer}.{name}", shape=shape, kind="matrix")
        for layer in range(8)
        for name, shape in (
            ("qkv", (1152, 384)),
            ("out", (384, 384)),
            ("barrier", (1024, 384)),
            ("up", (1024, 384)),
            ("down", (384, 1024)),
        )
    ),
)


def main() -> None:
    arguments = parse_arguments()
    if "RESULT" in os.environ:
        train_all(arguments)
        return
    if arguments.trainings:
        print(f"|{' | '.join(_TRAININGS)}|\n|{' --- |' * len(_TRAININGS)}")
        for num_ranks in arguments.ranks:
            for cells in run_trainings(arguments, num_ranks):
                print(f"| {' | '.join(cells)} |", flush=True)
        return
    print("| shapes | ranks | schedule | measured ms | predicted ms | predicted / measured, rounds | median |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.shapes:
        model = GATED if name == GATED.name else matrices_only(read_shapes(name))
        for num_ranks in arguments.ranks:
            rounds = run_on_ranks(measure, model, arguments.rounds, arguments.steps, num_ranks=num_ranks)
            for index, strategy in enumerate(STRATEGIES):
                print(row(name, num_ranks, strategy, [comparisons[index] for comparisons in rounds]), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--shapes", nargs="+", default=["t5-small", GATED.name], help="shape files, or gated-384")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="recorded steps per schedule and round")
    parser.add_argument("--trainings", action="store_true", help="whole steps of each mode, and memory")
    parser.add_argument("--rows", type=int, default=16, help="of a step of --trainings, of all ranks together")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    return parser.parse_args()


def matrices_only(model: ModelShapes) -> ModelShapes:
    return replace(model, parameters=tuple(p for p in model.parameters if p.kind != "elementwise"))


def measure(model: ModelShapes, num_rounds: int, num_steps: int) -> list[list[Comparison]]:
    options = list(STRATEGIES.values())
    return [compare(model, num_replicas=1, num_steps=num_steps, options=options) for _ in range(num_rounds)]


def row(name: str, num_ranks: int, strategy: str, comparisons: list[Comparison]) -> str:
    measured = median(1e3 * min(each.measured_seconds) for each in comparisons)
    predicted = median(1e3 * each.predicted.makespan for each in comparisons)
    ratios = [each.predicted.makespan / min(each.measured_seconds) for each in comparisons]
    listed = " ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"| {name} | {num_ranks} | {strategy} | {measured:.0f} | {predicted:.0f} | {listed} | {median(ratios):.2f} |"


_TRAININGS = ("ranks", "mode", "s, plan", "s", "plan / real, rounds", "median", "MB, plan", "MB", "plan / real ")
Pair = tuple[float, float]  # Of the plan, and measured.


def run_trainings(arguments: argparse.Namespace, num_ranks: int) -> list[list[str]]:
    """Cells of a row for each mode, from processes that torchrun starts.

    Times and memory are of different runs: a process that gives freed memory back at once is slow.
    """
    times = _trained(arguments.rounds, num_ranks, {})
    sizes = _trained(1, num_ranks, GIVES_MEMORY_BACK)
    return [
        [str(num_ranks), name, *_time_cells([seconds for seconds, _ in rounds]), *_memory_cells(sizes[name][0][1])]
        for name, rounds in times.items()
    ]


def _trained(num_rounds: int, num_ranks: int, environment: dict[str, str]) -> dict[str, list[tuple[Pair, Pair]]]:
    """Name of each mode -> seconds and bytes, of each round."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        environment = os.environ | environment | {"RESULT": str(result), "OMP_NUM_THREADS": "1"}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        words = [word for word in sys.argv if word != "--trainings"]
        command = [*launcher, *words, "--rounds", str(num_rounds)]
        subprocess.run(command, env=environment, check=True, timeout=1800)
        return json.loads(result.read_text())


def _time_cells(rounds: Sequence[Pair]) -> list[str]:
    planned, measured = (median(each) for each in zip(*rounds, strict=True))
    ratios = [planned / measured for planned, measured in rounds]
    listed = " ".join(f"{ratio:.2f}" for ratio in ratios)
    return [f"{planned:.3f}", f"{measured:.3f}", listed, f"{median(ratios):.2f}"]


def _memory_cells(pair: Pair) -> list[str]:
    planned, measured = pair
    return [f"{planned / 1e6:.0f}", f"{measured / 1e6:.0f}", f"{planned / measured:.2f}"]


def train_all(arguments: argparse.Namespace) -> None:
    """What each rank does: plan, train and measure every mode, as often as there are rounds."""
    torch.set_num_threads(1)
    num_ranks = arguments.ranks_per_node = int(os.environ["WORLD_SIZE"])
    first = Training({"sharding": "none" if num_ranks == 1 else "ddp"}, arguments, num_nodes=1)
    first.fabric.strategy.teardown()  # Its process group stays.
    del first
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    planned = planned_llama()
    modes = ["none"] if num_ranks == 1 else [mode for mode in TRAINING_MODES if mode != "none"]
    found: dict[str, list[tuple[Pair, Pair]]] = {}
    for _ in range(arguments.rounds):
        cost = calibrate(planned.shapes, num_ranks=num_ranks)
        if dist.get_rank() == 0:
            print(cost, file=sys.stderr, flush=True)
        asked, job = job_of_plan(planned, cost, flops_of_ranks(arguments), arguments)
        for way in (each.way for each in find_splits(asked, job, modes)[0]):
            name = f"{way.split.pipeline} x {way.split.replicate} x {way.split.shard}, {way.name}"
            found.setdefault(name, []).append(train(way, planned, cost, arguments))
    if dist.get_rank() == 0:
        Path(os.environ["RESULT"]).write_text(json.dumps(found))
    dist.barrier()


def job_of_plan(
    planned: PlannedModel, cost: CostModel, flops: float, arguments: argparse.Namespace
) -> tuple[argparse.Namespace, Job]:
    return asked_of_plan(arguments, planned, cost, "1f1b", num_ranks=dist.get_world_size(), flops=flops)


def train(way: Way, planned: PlannedModel, cost: CostModel, arguments: argparse.Namespace) -> tuple[Pair, Pair]:
    """Seconds and bytes of a step. The FLOP/s of the plan are the mean of what is measured before and after it."""
    before = flops_of_ranks(arguments)
    options = strategy_options(way)
    if way.split.mode == "flexdemo":
        options["optimizer"] = job_of_plan(planned, cost, before, arguments)[1].flexdemo
    training = Training(options, arguments, num_nodes=1)
    training.step()
    training.step()
    seconds = min(training.step() for _ in range(arguments.steps))
    asked, job = job_of_plan(planned, cost, (before + flops_of_ranks(arguments)) / 2, arguments)
    most = torch.tensor([seconds, peak_bytes(training)], dtype=torch.float64)
    training.fabric.strategy.teardown()  # Or it would be in memory beside the next one.
    dist.all_reduce(most, dist.ReduceOp.MAX)
    plan = find_splits(asked, job, [way.split.mode])[0][0]
    assert plan.way.name == way.name, "the plan is of another way, since the FLOP/s have changed; run it again"
    if dist.get_rank() == 0:
        speeds = f"{before / 1e9:.1f} GFLOP/s before, {job.flops_per_second / 1e9:.1f} on average"
        print(f"{way.name}: {speeds}; {plan.step_seconds:.3f} s planned, {seconds:.3f}", file=sys.stderr, flush=True)
    return (plan.step_seconds, float(most[0])), (plan.way.total, float(most[1]))


def flops_of_ranks(arguments: argparse.Namespace) -> float:
    """FLOP/s of forward and backward, the mean of all ranks. Collective; every rank must call it."""
    flops = torch.tensor(measured_flops(arguments), dtype=torch.float64)
    dist.all_reduce(flops)
    return float(flops) / dist.get_world_size()


if __name__ == "__main__":
    main()
