"""Bytes and times of FlexDeMo over slow links: numbers and text of ``lightning-muon plan``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

from rich.console import RenderableType
from torch.distributed.tensor import Shard

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.table import table
from lightning_muon.flexdemo.bucket_plan import BucketPlan, Shape, plan_buckets
from lightning_muon.flexdemo.config import FlexDeMoConfig, ValueFormatName
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo, LocalSteps, SharedElements, period
from lightning_muon.params.layout import held_boxes
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape

# Bits per second of a node's link, for all its ranks together: data centres, offices, homes.
LINKS = {"10 Gbit/s": 10e9, "1 Gbit/s": 1e9, "100 Mbit/s": 100e6}
# The grid of Table 1 of the paper (arXiv:2502.06728).
TOP_KS = (1, 2, 4, 8, 16, 32)
# A product's backward has two products of its size, so backward is two thirds of the arithmetic of a step.
_BACKWARD_SHARE = 2 / 3
_ALL_REDUCE_ITEMSIZE = 2
# Two nodes always exchange whole messages; from this number on it depends on the plan.
_MANY = 3


class NodeTraffic(NamedTuple):
    """Bytes of one node in one step, all its ranks together; means if an exchange takes place less often."""

    gathered: float  # Messages that are sent whole to each other node.
    reduced: float  # Messages that are summed on the way: each of R nodes gets and sums 1 / R of them.
    returned: float  # The sums, which are sent back.
    # All bytes over the link of the node: `(R - 1) * gathered + (R - 1) / R * (reduced + returned)`.
    sent: float


def slow_links(
    model: ModelShapes, mesh: Mesh, config: FlexDeMoConfig, *, compute_seconds: float | None = None
) -> dict[str, Any]:
    """Bytes, bits and seconds of FlexDeMo, the configured one first, and of the all-reduce of hybrid sharding.

    ``compute_seconds`` are those of forward and backward of one step, without any exchange between nodes.
    """
    trained = [parameter for parameter in model.parameters if not parameter.frozen]
    numel = sum(math.prod(parameter.shape) for parameter in trained)
    if not numel:
        raise ValueError(f"{model.name} has no parameters that are trained, so there is nothing to plan")
    summed = _summed_up(_ALL_REDUCE_ITEMSIZE * numel, mesh.replicate)

    def row(each: FlexDeMoConfig | None) -> dict[str, Any]:
        """Numbers of an exchange; ``None`` for the all-reduce."""
        traffic = summed if each is None else node_traffic(trained, mesh, each)
        message = traffic.gathered + traffic.reduced  # Bytes of the node's message, whatever the number of others.
        saved = summed.reduced + summed.returned - traffic.reduced - traffic.returned
        break_even = max(0.0, saved / traffic.gathered) if traffic.gathered else (None if saved >= 0 else 0.0)
        seconds = {name: 8 * traffic.sent / rate for name, rate in LINKS.items()}
        return {
            **_names(each),
            "bits_per_parameter": 8 * message / numel,
            "bytes": {**traffic._asdict(), "message": message},
            # Number of nodes from which on the all-reduce sends less.
            "break_even_nodes": break_even,
            "step_seconds": {name: step_seconds(each, value, compute_seconds) for name, value in seconds.items()},
        }

    return {
        "nodes": mesh.replicate,
        "base": config.base,
        "compute_seconds": compute_seconds,
        "all_reduce": row(None),
        "rows": [row(each) for each in comparison(config)],
    }


def _names(config: FlexDeMoConfig | None) -> dict[str, str]:
    """Name of the replicator with the options that affect bytes, ``DCTTopK(64, 8)``; ``None`` for the all-reduce."""
    if config is None:
        return {"name": "HSDP, all-reduce", "value_format": "bf16"}
    replicator = config.replicator
    values = [str(getattr(replicator, key)) for key in ("chunk_size", "top_k", "period") if hasattr(replicator, key)]
    if isinstance(replicator, SharedElements):
        values.append(f"1/{period(replicator.rate)}")  # The rounded rate.
    value_format = "fp32" if isinstance(replicator, LocalSteps) else config.value_format
    return {"name": f"{type(replicator).__name__}({', '.join(values)})", "value_format": value_format}


def step_seconds(config: FlexDeMoConfig | None, exchange: float, compute: float | None) -> float:
    """Seconds of forward, backward and exchange; of the exchange alone if the former are unknown.

    Overlapped with backward: ``C / 3 + max(2 C / 3, E)``; one after the other: ``C + E``; one step late: ``max(C, E)``,
    with C seconds of arithmetic and E seconds of exchange.
    """
    if compute is None:
        return exchange
    if config is not None:
        replicator = config.replicator
        if config.delay > 0 or (isinstance(replicator, DiLoCo) and replicator.overlap):
            return max(compute, exchange)
        # Weights can be averaged when a step is complete, not before.
        if config.overlap == "step" or isinstance(replicator, LocalSteps):
            return compute + exchange
    backward = _BACKWARD_SHARE * compute
    return compute - backward + max(backward, exchange)


def comparison(config: FlexDeMoConfig) -> Iterator[FlexDeMoConfig]:
    """Yield the user's config, then DCTTopK with other numbers of coefficients, then the user's with other formats."""
    yield config
    asked = config.replicator
    template = asked if isinstance(asked, DCTTopK) else DCTTopK()
    without_own_momentum = {key: getattr(FlexDeMoConfig, key) for key in ("momentum", "nesterov")}
    for top_k in TOP_KS:
        other = replace(config, replicator=replace(template, top_k=top_k), **without_own_momentum)
        if other.replicator != asked:
            yield other
    for value_format in () if isinstance(asked, LocalSteps) else get_args(ValueFormatName):
        if value_format != config.value_format:
            yield replace(config, value_format=value_format)


def node_traffic(trained: Sequence[ParameterShape], mesh: Mesh, config: FlexDeMoConfig) -> NodeTraffic:
    """Bytes that the ranks of one node send for parameters, in the order of the model, by their message layouts."""
    if isinstance(config.replicator, LocalSteps):
        numel = sum(math.prod(parameter.shape) for parameter in trained)
        return _summed_up(config.replicator.bits_per_parameter() / 8 * numel, mesh.replicate)
    gathered = reduced = returned = sent = 0
    for shapes, num_ranks in shard_shapes(trained, mesh.shard):
        # One of the buckets with messages of each form, and their number: counting all takes long with many nodes.
        kinds: dict[tuple[object, ...], tuple[BucketPlan, int]] = {}
        for plan in plan_buckets(shapes, config):
            form = tuple((type(p.replicator), id(p.values), p.num_blocks, p.block_numel) for p in plan.parts)
            kinds[form] = plan, kinds.get(form, (plan, 0))[1] + num_ranks
        for plan, number in kinds.values():
            if plan.is_summed(_MANY):
                reduced += number * plan.message_bytes()
                returned += number * plan.returned_dtype.itemsize * sum(plan.segment_lengths(0, 1))
            else:
                gathered += number * plan.message_bytes()
            # The first node adds up the longest segments.
            sent += number * plan.sent_bytes(0, mesh.replicate)
    return NodeTraffic(gathered, reduced, returned, sent)


def shard_shapes(trained: Sequence[ParameterShape], num_shards: int) -> Iterator[tuple[list[Shape], int]]:
    """Yield shapes of the shards of one rank, and the number of ranks of a node with the same shapes."""
    coordinates = [(rank,) for rank in range(num_shards)]
    distinct = {(p.shape, p.shard_dim): index for index, p in enumerate(trained) if p.shape}
    places = {key: place for place, key in enumerate(distinct)}
    columns = [held_boxes(shape, (num_shards,), (Shard(dim),), coordinates) for shape, dim in distinct]
    for boxes, count in Counter(zip(*([box.shape for box in column] for column in columns), strict=True)).items():
        yield [Shape(p.shape, boxes[places[p.shape, p.shard_dim]] if p.shape else ()) for p in trained], count


def _summed_up(num_bytes: float, num_nodes: int) -> NodeTraffic:
    """Traffic of a ring all-reduce of ``num_bytes``."""
    return NodeTraffic(0, num_bytes, num_bytes, 2 * (num_nodes - 1) / num_nodes * num_bytes)


def slow_links_report(links: dict[str, Any], config: FlexDeMoConfig) -> list[RenderableType]:
    """A table with a row for each way to exchange, and a legend of its columns."""
    late = f", {config.delay} step late" if config.delay else ""
    times = "the exchange alone (give forward and backward with --compute-seconds)"
    if links["compute_seconds"] is not None:
        times = f"a step with {_seconds(links['compute_seconds'])} of forward and backward"
    columns = {"exchange": "", "values": "", "bits": ".3f", "sent MB": ",.3f", "break-even": ",.1f"}
    return [
        f"{links['nodes']} nodes (replicate axis); base {config.base}, overlap={config.overlap}{late}\n",
        table(
            columns | dict.fromkeys(LINKS, ">"),
            [
                (
                    f"{row['name']} *" if row is links["rows"][0] else row["name"],
                    row["value_format"],
                    row["bits_per_parameter"],
                    row["bytes"]["sent"] / 1e6,
                    row["break_even_nodes"],
                    *map(_seconds, row["step_seconds"].values()),
                )
                for row in (links["all_reduce"], *links["rows"])
            ],
        ),
        "\n* the configured one. bits: per parameter. sent: by the busiest node, all its ranks, in 10^6 bytes.",
        "break-even: from this number of nodes on the all-reduce of HSDP sends less (-: never).",
        f"Times are at the full rate of one link for each node, those of {times}.",
    ]


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:,.2f} s" if value < 1000 else f"{value:,.0f} s"
    return f"{1e3 * value:,.2f} ms" if value < 0.1 else f"{1e3 * value:,.0f} ms"
