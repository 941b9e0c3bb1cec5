"""``lightning-muon trace``: record real optimizer steps, and draw them above their prediction."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lightning_muon.cli import trace_pipeline
from lightning_muon.cli.plan_model import add_model_arguments, read_model
from lightning_muon.cli.table import count, memory_of_host
from lightning_muon.math.product_costs import MeasuredCosts
from lightning_muon.monitor.calibrate import ARITHMETIC, Comparison, compare, run_on_ranks, this_device
from lightning_muon.monitor.measure_products import measure_costs, model_matrices
from lightning_muon.schedule.shapes import ModelShapes

# Weight, gradient and two moments of AdamW in float32; matrices have one tensor less, their momentum.
_BYTES_PER_ELEMENT = 16
_DESCRIPTION = """Run optimizer steps on random weights of the given shapes, without a model, and write when every op of
every rank ran: DIR/trace.json (open it at https://ui.perfetto.dev), and DIR/timeline.png and .svg, measured above
predicted. The prediction comes from a calibration in the same run. DIR/ns_costs.json is a file for the option ns_costs
of the optimizer. Starts gloo processes on this machine; under torchrun the ranks are those that it has started, on
CUDA if there is any. With a pipeline (pipeline_size of the config's strategy, or --pipeline-size) it trains the model
of the config on its data, with its Trainer and without its callbacks, and draws forward, backward, messages and
optimizer of each rank above the plan."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description, add = _DESCRIPTION, parser.add_argument
    add_model_arguments(parser)
    add("--steps", type=count, default=5, help="recorded steps (default 5)")
    trace_pipeline.add_arguments(parser)
    add("--out", type=Path, required=True, metavar="DIR", help="folder for what is written")


def run(arguments: argparse.Namespace) -> None:
    """Run steps, and write the recording."""
    if trace_pipeline.is_asked_for(arguments):
        trace_pipeline.run(arguments)
        return
    planned = read_model(arguments)
    model, config = planned.shapes, planned.optimizer
    mesh = planned.mesh(arguments)
    options = {key: getattr(config, key) for key in ("assignment", "look_ahead", "chunk_bytes", *ARITHMETIC)}
    options["overlap"] = "off" if config.overlap == "off" else "step"
    is_launched = "RANK" in os.environ
    if not is_launched:
        # All ranks are on this machine, with all of the model in each replica.
        numel = sum(math.prod(parameter.shape) for parameter in model.parameters if not parameter.frozen)
        needed = numel * _BYTES_PER_ELEMENT * mesh.replicate
        present = memory_of_host()
        if needed > present:
            raise ValueError(
                f"{model.name} with its gradients and states takes {needed / 2**30:.0f} GiB, and this machine has "
                f"{present / 2**30:.0f} GiB; trace fewer layers"
            )
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = partial(_measure, model, num_replicas=mesh.replicate, num_steps=arguments.steps, options=options)
    comparison, ns_costs = run_on_ranks(run, num_ranks=mesh.size)
    if is_launched and os.environ["RANK"] != "0":
        return
    title = f"{model.name} on {mesh.replicate} x {mesh.shard} ranks"
    folder, cost = arguments.out, comparison.cost
    (folder / "cost.json").write_text(json.dumps(asdict(cost)) + "\n", encoding="utf-8")
    (folder / "ns_costs.json").write_text(ns_costs.to_json() + "\n", encoding="utf-8")
    timelines = {"measured": comparison.recording.timeline, "predicted": comparison.predicted}
    written = trace_pipeline.write_recording(folder, comparison.recording, timelines, title)
    measured, predicted = min(comparison.measured_seconds), comparison.predicted.makespan
    steps = " ".join(f"{1e3 * seconds:.1f}" for seconds in comparison.measured_seconds)
    links = ", ".join(
        f"{1e6 * latency:.0f} us + bytes / {bandwidth / 1e9:.3g} GB/s"
        for latency, bandwidth in zip(cost.latency_seconds, cost.bandwidth, strict=True)
    )
    memory = f"{cost.memory_bytes_per_second / 1e9:.3g} GB/s of memory"
    sys.stdout.write(
        f"measured   {1e3 * measured:9.1f} ms per step (fastest of {steps})\n"
        f"predicted  {1e3 * predicted:9.1f} ms, {predicted / measured:.2f} of measured\n"
        f"calibrated {cost.flops_per_second / 1e9:.4g} GFLOP/s, {memory}, "
        f"{1e6 * cost.op_seconds:.0f} us per op; links: {links}\n"
        f"wrote {written}, cost.json (for plan --cost), ns_costs.json (for ns_costs of the optimizer)\n"
    )


def _measure(
    model: ModelShapes, *, num_replicas: int, num_steps: int, options: dict[str, Any]
) -> tuple[Comparison, MeasuredCosts]:
    """Measure steps, and the costs of products while all ranks compute. Collective; every rank must call it."""
    (comparison,) = compare(model, num_replicas=num_replicas, num_steps=num_steps, options=[options])
    return comparison, measure_costs(model_matrices(model), this_device())
