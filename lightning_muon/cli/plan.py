"""``lightning-muon plan``: what a step will cost on any number of ranks, without starting one."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_muon.cli.plan_flexdemo import slow_links, slow_links_as_text
from lightning_muon.cli.plan_model import (
    Mesh,
    PlannedModel,
    config_from_words,
    read_config,
    with_fused,
    with_stacks_cut_along,
)
from lightning_muon.cli.plan_report import plan_as_dict, plan_as_text, section, zero2_table, zero2_ways
from lightning_muon.cli.plan_strategies import CompareOptions, choice_of, compare_strategies
from lightning_muon.config import MuonConfig
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.monitor.calibrate import calibrate, matrix_shapes
from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.draw import draw_timelines
from lightning_muon.schedule.shapes import ModelShapes, read_shapes, shipped_shapes, write_shapes

MOST_RANKS = 4096
_DEFAULT_SHARD = 8
_DESCRIPTION = f"""Show what each parameter is, who owns which matrix, what travels, and how long a step takes with each
strategy. Starts no process and needs no GPU; up to {MOST_RANKS} ranks."""


def plan_command(args: Sequence[str], *, cli_class: Callable[[], type[Any]]) -> None:
    """Run ``lightning-muon plan``; a failure ends the process with a message.

    ``cli_class`` gives ``LightningCLI`` of the installed package; it is called for ``--config`` only.
    """
    arguments = _parser().parse_args(args)
    was_collecting = gc.isenabled()
    # The plan of thousands of ranks has millions of small objects without cycles; looking for some takes a third of the
    # time.
    gc.disable()
    try:
        sys.stdout.write(_plan(arguments, cli_class))
    except (OSError, ValueError, TypeError, ModuleNotFoundError) as error:
        raise SystemExit(f"lightning-muon plan: {error}") from error
    finally:
        if was_collecting:
            gc.enable()


def _plan(arguments: argparse.Namespace, cli_class: Callable[[], type[Any]]) -> str:
    """Plan, write the files that are asked for, and return the report."""
    planned = _read_model(arguments, cli_class)
    model = with_fused(planned.shapes, dict(arguments.fused))
    if arguments.stack_shard_dim is not None:
        model = with_stacks_cut_along(model, arguments.stack_shard_dim)
    if arguments.write_shapes is not None:
        write_shapes(model, arguments.write_shapes)
    mesh = _mesh(arguments, planned)
    options = _options(arguments, planned.optimizer, model, mesh)
    links, zero2 = None, []
    choice, outcomes = None, []
    if planned.flexdemo is not None:
        links = slow_links(model, mesh, planned.flexdemo, compute_seconds=arguments.compute_seconds)
        if planned.flexdemo.base == "muon":
            # Nodes do not share matrices: every one of them divides all among its own ranks.
            outcomes = compare_strategies(model, replace(mesh, replicate=1), options)
    else:
        outcomes = compare_strategies(model, mesh, options)
        zero2 = zero2_ways(model, mesh, options.cost, node_ranks=arguments.node_ranks)
        if arguments.config is not None:
            choice = choice_of(planned.optimizer, model, mesh, options)
    if arguments.draw and not outcomes:
        raise ValueError("--draw shows the timeline of Newton-Schulz, which FlexDeMo has with base=muon only")
    for path in arguments.draw:
        timelines = {outcome.name: outcome.timeline for outcome in outcomes}
        draw_timelines(timelines, path, title=f"{model.name} on {mesh.replicate} x {mesh.shard} ranks")
    if arguments.json:
        plan = plan_as_dict(model, mesh, options, outcomes, choice=choice, slow_links=links)
        return json.dumps(plan | {"zero2": zero2 or None}) + "\n"
    shown = slow_links_as_text(links, planned.flexdemo) if links and planned.flexdemo else ""
    text = plan_as_text(model, mesh, options, outcomes, choice=choice, slow_links=shown)
    if zero2:
        text += f"\n{section('Gradients and values with sharding=zero2, one step', zero2_table(zero2))}\n"
    return text


def _read_model(arguments: argparse.Namespace, cli_class: Callable[[], type[Any]]) -> PlannedModel:
    if arguments.config is not None:
        planned = read_config(arguments.config, cli_class())
    else:
        shapes = read_shapes(arguments.shapes)
        planned = PlannedModel(shapes=shapes, optimizer=MuonConfig(), replicate=None, shard=None)
    if arguments.flexdemo is None:
        return planned
    return replace(planned, flexdemo=config_from_words(arguments.flexdemo, planned.flexdemo or FlexDeMoConfig()))


def _mesh(arguments: argparse.Namespace, planned: PlannedModel) -> Mesh:
    # An exchange between nodes takes two of them.
    fewest = 1 if planned.flexdemo is None else 2
    mesh = Mesh(
        replicate=_first(arguments.replicate, planned.replicate, fewest),
        shard=_first(arguments.shard, planned.shard, _DEFAULT_SHARD if arguments.config is None else None),
    )
    if mesh.shard is None:
        raise ValueError(f"{arguments.config} does not say how many ranks there are; add --shard (and --replicate)")
    for name, size in asdict(mesh).items():
        if size < 1:
            raise ValueError(f"--{name} must be at least 1, got {size}")
    if mesh.size > MOST_RANKS:
        raise ValueError(
            f"{mesh.replicate} x {mesh.shard} = {mesh.size} ranks are more than {MOST_RANKS}; choose a smaller "
            "--replicate or --shard"
        )
    return mesh


def _first(*values: Any) -> Any:
    """The first value that is given."""
    return next((value for value in values if value is not None), None)


def _options(arguments: argparse.Namespace, optimizer: MuonConfig, model: ModelShapes, mesh: Mesh) -> CompareOptions:
    smallest = {"wire_bytes": 1, "chunk_bytes": 1, "ns_steps": 1, "buffer_bytes": 1, "node_ranks": 1, "look_ahead": 0}
    for name, least in smallest.items():
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    seconds = arguments.compute_seconds
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"--compute-seconds must be finite and above 0, got {seconds}")
    # On CUDA, where "auto" is bfloat16.
    wire_dtype = optimizer.wire_dtype if optimizer.wire_dtype != "auto" else optimizer.compute_dtype
    return CompareOptions(
        ns_steps=_first(arguments.ns_steps, optimizer.ns_steps),
        wire_itemsize=_first(arguments.wire_bytes, 4 if wire_dtype == "float32" else 2),
        chunk_bytes=_first(arguments.chunk_bytes, optimizer.chunk_bytes),
        look_ahead=_first(arguments.look_ahead, optimizer.look_ahead),
        buffer_bytes=arguments.buffer_bytes,
        cost=_cost_model(arguments, model, mesh),
    )


def _cost_model(arguments: argparse.Namespace, model: ModelShapes, mesh: Mesh) -> CostModel:
    """The machine: measured, a file or a preset, with single numbers replaced."""
    cost = PRESETS[arguments.machine]
    if arguments.calibrate:
        cost = _measured(model, mesh)
    elif arguments.cost is not None:
        try:
            cost = CostModel.from_dict(json.loads(arguments.cost.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{arguments.cost}: {error}") from error
    if arguments.flops is not None:
        cost = replace(cost, flops_per_second=arguments.flops)
    if arguments.memory_bandwidth is not None:
        cost = replace(cost, memory_bytes_per_second=arguments.memory_bandwidth)
    if arguments.bandwidth is not None:
        cost = replace(cost, bandwidth=(arguments.bandwidth, *cost.bandwidth[1:]))
    if arguments.inter_bandwidth is not None:
        cost = replace(cost, bandwidth=(cost.bandwidth[0], arguments.inter_bandwidth))
    if arguments.latency is not None:
        cost = replace(cost, latency_seconds=(arguments.latency, *cost.latency_seconds[1:]))
    return cost


def _measured(model: ModelShapes, mesh: Mesh) -> CostModel:
    """Rates of this machine, with one process for each rank of the mesh."""
    num_cores = os.cpu_count() or 1
    if mesh.size > 4 * num_cores:
        raise ValueError(
            f"--calibrate starts a process for each of the {mesh.size} ranks, which is too many for {num_cores} "
            "cores; calibrate on fewer ranks (lightning-muon trace writes cost.json) and hand that over with --cost"
        )
    return calibrate(matrix_shapes(model), num_ranks=mesh.size, num_replicas=mesh.replicate)


def _fused(text: str) -> tuple[str, tuple[int, ...]]:
    pattern, _, sizes = text.rpartition("=")
    try:
        parts = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        parts = ()
    if not pattern or not parts:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=NUMBER or PATTERN=SIZE,SIZE,...")
    return pattern, parts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-muon plan", description=_DESCRIPTION)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--config", metavar="FILE.yaml", type=Path, help="what lightning-muon fit takes")
    model.add_argument("--shapes", metavar="FILE.json", help=f"a shape file, or one of: {', '.join(shipped_shapes())}")
    parser.add_argument(
        "--replicate", metavar="R", type=int, help="replicas (default: the config's, or 1; FlexDeMo: 2)"
    )
    parser.add_argument("--shard", metavar="S", type=int, help="ranks per replica (default: the config's, or 8)")
    parser.add_argument("--fused", metavar="PATTERN=N", type=_fused, action="append", default=[], help=_FUSED_HELP)
    parser.add_argument(
        "--stack-shard-dim", metavar="DIM", type=int, help="dimension along which stacks of experts are cut (0)"
    )
    parser.add_argument("--ns-steps", metavar="N", type=int, help="Newton-Schulz iterations (the config's, or 5)")
    parser.add_argument(
        "--wire-bytes", metavar="N", type=int, help="bytes of an element that travels (by the config's dtypes, or 2)"
    )
    parser.add_argument("--chunk-bytes", metavar="N", type=int, help="of what a rank owns of a bucket (the config's)")
    parser.add_argument("--look-ahead", metavar="N", type=int, help="buckets on their way at a time (the config's)")
    parser.add_argument("--buffer-bytes", metavar="N", type=int, help="bound of a rank's buffers")
    _add_flexdemo(parser.add_argument_group("FlexDeMo"))
    _add_machine(parser.add_argument_group("machine"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print everything as JSON instead of text")
    output.add_argument(
        "--draw", metavar="FILE", type=Path, nargs="+", default=[], help="timelines as .png, .svg or .pdf"
    )
    output.add_argument("--write-shapes", metavar="FILE.json", type=Path, help="save the shapes of the model")
    return parser


_FUSED_HELP = "divide the weights with matching names into N equal matrices, or into parts of sizes N,N,...; repeatable"


def _add_flexdemo(group: Any) -> None:
    group.add_argument(
        "--flexdemo",
        metavar="KEY=VALUE",
        nargs="*",
        help="plan FlexDeMo with these options: replicator=DCTTopK chunk_size=64 top_k=8 value_format=int8 base=adamw",
    )
    group.add_argument(
        "--compute-seconds", metavar="X", type=float, help="of forward and backward of one step, for its predicted time"
    )


def _add_machine(group: Any) -> None:
    group.add_argument("--machine", choices=sorted(PRESETS), default="reference", help="rates to start from")
    group.add_argument("--cost", metavar="FILE.json", type=Path, help="rates from a file, in place of --machine")
    group.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine, with a process for each rank; takes some 20 seconds",
    )
    group.add_argument("--node-ranks", metavar="N", type=int, default=8, help="ranks of a node, for sharding=zero2 (8)")
    group.add_argument("--flops", metavar="X", type=float, help="FLOP/s of Newton-Schulz")
    group.add_argument("--memory-bandwidth", metavar="X", type=float, help="bytes/s of elementwise work")
    group.add_argument("--bandwidth", metavar="X", type=float, help="bytes/s of a rank's link (within a replica)")
    group.add_argument("--inter-bandwidth", metavar="X", type=float, help="bytes/s between replicas")
    group.add_argument("--latency", metavar="X", type=float, help="seconds of a transfer (within a replica)")
