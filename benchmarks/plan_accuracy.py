"""How well a calibrated plan predicts a real step, on gloo processes of this machine.

    python benchmarks/plan_accuracy.py --ranks 2 4

Each round calibrates (a measurement on a sample of the matrices) and then records steps of the whole model, serial and
with overlap, in the same processes. The fastest step counts, in the calibration too, because other work on the machine
only ever adds; the ratio of each round is taken by itself and the median of the rounds is reported.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median

from lightning_muon.monitor.calibrate import Comparison, compare, run_on_ranks
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


if __name__ == "__main__":
    main()
