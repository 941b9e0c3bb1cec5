"""``lightning-muon plan``: what a step will cost on any number of ranks, without starting one."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

from lightning_muon.cli.plan_flexdemo import slow_links, slow_links_as_text
from lightning_muon.cli.plan_model import (
    Mesh,
    PlannedModel,
    config_from_words,
    read_config,
    with_fused,
    with_stacks_cut_along,
)
from lightning_muon.cli.plan_report import plan_as_dict, plan_as_text, zero2_ways
from lightning_muon.cli.plan_strategies import CompareOptions, choice_of, compare_strategies
from lightning_muon.config import MuonConfig
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.monitor.calibrate import calibrate, matrix_shapes
from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.draw import draw_timelines
from lightning_muon.schedule.shapes import ModelShapes, read_shapes, shipped_shapes, write_shapes

MOST_RANKS = 4096
_DESCRIPTION = f"""Show what each parameter is, who owns which matrix, what travels, and how long a step takes with each
strategy. Starts no process and needs no GPU; up to {MOST_RANKS} ranks."""


def run(arguments: argparse.Namespace) -> None:
    """Plan and print."""
    was_collecting = gc.isenabled()
    gc.disable()  # A plan of thousands of ranks has millions of objects without cycles: a third of the time.
    try:
        sys.stdout.write(_plan(arguments))
    finally:
        if was_collecting:
            gc.enable()


def _plan(arguments: argparse.Namespace) -> str:
    """Plan, write the files that are asked for, and return the report."""
    if arguments.config is not None:
        planned = read_config(arguments.config)
    else:
        shapes = read_shapes(arguments.shapes)
        planned = PlannedModel(shapes=shapes, optimizer=MuonConfig(), replicate=None, shard=8)
    flexdemo = planned.flexdemo
    if arguments.flexdemo is not None:
        flexdemo = config_from_words(arguments.flexdemo, flexdemo or FlexDeMoConfig())
    model = with_fused(planned.shapes, dict(arguments.fused))
    if arguments.stack_shard_dim is not None:
        model = with_stacks_cut_along(model, arguments.stack_shard_dim)
    if arguments.write_shapes is not None:
        write_shapes(model, arguments.write_shapes)
    # An exchange between nodes takes two of them.
    mesh = _mesh(arguments, planned, fewest_replicas=1 if flexdemo is None else 2)
    optimizer = planned.optimizer
    # On CUDA, where "auto" is bfloat16.
    wire_dtype = optimizer.wire_dtype if optimizer.wire_dtype != "auto" else optimizer.compute_dtype
    options = CompareOptions(
        ns_steps=arguments.ns_steps or optimizer.ns_steps,
        wire_itemsize=arguments.wire_bytes or (4 if wire_dtype == "float32" else 2),
        chunk_bytes=arguments.chunk_bytes or optimizer.chunk_bytes,
        look_ahead=arguments.look_ahead or optimizer.look_ahead,
        buffer_bytes=arguments.buffer_bytes,
        cost=_cost_model(arguments, model, mesh),
    )
    links, zero2, choice, outcomes = None, [], None, []
    if flexdemo is not None:
        links = slow_links(model, mesh, flexdemo, compute_seconds=arguments.compute_seconds)
        if flexdemo.base == "muon":
            # Nodes do not share matrices: every one of them divides all among its own ranks.
            outcomes = compare_strategies(model, replace(mesh, replicate=1), options)
    else:
        outcomes = compare_strategies(model, mesh, options)
        zero2 = zero2_ways(model, mesh, options.cost, node_ranks=arguments.node_ranks)
        if arguments.config is not None:
            choice = choice_of(optimizer, model, mesh, options)
    if arguments.draw and not outcomes:
        raise ValueError("--draw shows the timeline of Newton-Schulz, which FlexDeMo has with base=muon only")
    for path in arguments.draw:
        timelines = {outcome.name: outcome.timeline for outcome in outcomes}
        draw_timelines(timelines, path, title=f"{model.name} on {mesh.replicate} x {mesh.shard} ranks")
    plan = plan_as_dict(model, mesh, options, outcomes, choice=choice, slow_links=links, zero2=zero2)
    if arguments.json:
        return json.dumps(plan) + "\n"
    shown = slow_links_as_text(links, flexdemo) if links and flexdemo else ""
    return plan_as_text(plan, model, outcomes, slow_links=shown)


def _mesh(arguments: argparse.Namespace, planned: PlannedModel, *, fewest_replicas: int) -> Mesh:
    shard = arguments.shard or planned.shard
    if shard is None:
        raise ValueError(f"{arguments.config} does not say how many ranks there are; add --shard (and --replicate)")
    mesh = Mesh(replicate=arguments.replicate or planned.replicate or fewest_replicas, shard=shard)
    if mesh.size > MOST_RANKS:
        raise ValueError(
            f"{mesh.replicate} x {mesh.shard} = {mesh.size} ranks are more than {MOST_RANKS}; choose a smaller "
            "--replicate or --shard"
        )
    return mesh


def _cost_model(arguments: argparse.Namespace, model: ModelShapes, mesh: Mesh) -> CostModel:
    """The machine: measured, a file or a preset, with single numbers replaced."""
    cost = PRESETS[arguments.machine]
    if arguments.calibrate:
        num_cores = os.cpu_count() or 1
        if mesh.size > 4 * num_cores:
            raise ValueError(
                f"--calibrate starts a process for each of the {mesh.size} ranks, which is too many for {num_cores} "
                "cores; calibrate on fewer ranks (lightning-muon trace writes cost.json) and hand that over with --cost"
            )
        cost = calibrate(matrix_shapes(model), num_ranks=mesh.size, num_replicas=mesh.replicate)
    elif arguments.cost is not None:
        try:
            cost = CostModel.from_dict(json.loads(arguments.cost.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{arguments.cost}: {error}") from error
    between = cost.bandwidth[1:] if arguments.inter_bandwidth is None else (arguments.inter_bandwidth,)
    latency = cost.latency_seconds[0] if arguments.latency is None else arguments.latency
    return replace(
        cost,
        flops_per_second=arguments.flops or cost.flops_per_second,
        memory_bytes_per_second=arguments.memory_bandwidth or cost.memory_bytes_per_second,
        bandwidth=(arguments.bandwidth or cost.bandwidth[0], *between),
        latency_seconds=(latency, *cost.latency_seconds[1:]),
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be finite and above 0, got {value}")
    return value


def _fused(text: str) -> tuple[str, tuple[int, ...]]:
    pattern, _, sizes = text.rpartition("=")
    try:
        parts = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        parts = ()
    if not pattern or not parts:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=NUMBER or PATTERN=SIZE,SIZE,...")
    return pattern, parts


# Options that take one value: name, what it is called, its type, and what it means.
_SHAPE_OPTIONS = (
    ("--replicate", "R", _count, "replicas (default: the config's, or 1; FlexDeMo: 2)"),
    ("--shard", "S", _count, "ranks per replica (default: the config's, or 8)"),
    ("--stack-shard-dim", "DIM", int, "dimension along which stacks of experts are cut (0)"),
    ("--ns-steps", "N", _count, "Newton-Schulz iterations (the config's, or 5)"),
    ("--wire-bytes", "N", _count, "bytes of an element that travels (by the config's dtypes, or 2)"),
    ("--chunk-bytes", "N", _count, "of what a rank owns of a bucket (the config's)"),
    ("--look-ahead", "N", _count, "buckets on their way at a time (the config's)"),
    ("--buffer-bytes", "N", _count, "bound of a rank's buffers"),
)
_MACHINE_OPTIONS = (
    ("--cost", "FILE.json", Path, "rates from a file, in place of --machine"),
    ("--flops", "X", _positive, "FLOP/s of Newton-Schulz"),
    ("--memory-bandwidth", "X", _positive, "bytes/s of elementwise work"),
    ("--bandwidth", "X", _positive, "bytes/s of a rank's link (within a replica)"),
    ("--inter-bandwidth", "X", _positive, "bytes/s between replicas"),
    ("--latency", "X", float, "seconds of a transfer (within a replica)"),
)
_FUSED_HELP = "divide the weights with matching names into N equal matrices, or into parts of sizes N,N,...; repeatable"
_WORDS_HELP = "with these options: replicator=DCTTopK chunk_size=64 top_k=8 value_format=int8 base=adamw"
_CALIBRATE_HELP = "measure this machine, with a process for each rank; takes some 20 seconds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--config", metavar="FILE.yaml", type=Path, help="what lightning-muon fit takes")
    model.add_argument("--shapes", metavar="FILE.json", help=f"a shape file, or one of: {', '.join(shipped_shapes())}")
    for name, metavar, kind, text in _SHAPE_OPTIONS:
        parser.add_argument(name, metavar=metavar, type=kind, help=text)
    parser.add_argument("--fused", metavar="PATTERN=N", type=_fused, action="append", default=[], help=_FUSED_HELP)
    group = parser.add_argument_group("FlexDeMo")
    group.add_argument("--flexdemo", metavar="KEY=VALUE", nargs="*", help=f"plan FlexDeMo {_WORDS_HELP}")
    text = "of forward and backward of one step, for its predicted time"
    group.add_argument("--compute-seconds", metavar="X", type=_positive, help=text)
    machine = parser.add_argument_group("machine")
    machine.add_argument("--machine", choices=sorted(PRESETS), default="reference", help="rates to start from")
    machine.add_argument("--calibrate", action="store_true", help=_CALIBRATE_HELP)
    text = "ranks of a node, for sharding=zero2 (8)"
    machine.add_argument("--node-ranks", metavar="N", type=_count, default=8, help=text)
    for name, metavar, kind, text in _MACHINE_OPTIONS:
        machine.add_argument(name, metavar=metavar, type=kind, help=text)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print everything as JSON instead of text")
    text = "timelines as .png, .svg or .pdf"
    output.add_argument("--draw", metavar="FILE", type=Path, nargs="+", default=[], help=text)
    output.add_argument("--write-shapes", metavar="FILE.json", type=Path, help="save the shapes of the model")
