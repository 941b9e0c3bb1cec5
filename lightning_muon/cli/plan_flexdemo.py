"""What FlexDeMo sends over slow links, and how long that takes: numbers, text and JSON of ``lightning-muon plan``."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from torch.distributed.tensor import Shard

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_report import WIDTH, table
from lightning_muon.flexdemo.bucket_plan import (
    BucketPlan,
    Shape,
    aligned,
    is_dense,
    is_summed,
    message_bytes,
    plan_buckets,
    returned_dtype,
    sent_bytes,
)
from lightning_muon.flexdemo.config import FlexDeMoConfig, ValueFormatName
from lightning_muon.flexdemo.replicator import LocalSteps, Replicator, period
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo, Random, Slicing, Striding
from lightning_muon.params.layout import held_boxes
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape

_SCALES = {"MB": 1e6, "GB": 1e9}
# Options of replicators that make a difference to the bytes, beside the rate.
_COUNTED = ("chunk_size", "top_k", "period")
# Bits per second of a node's link, for all its ranks together: data centres, offices, homes.
LINKS = {"10 Gbit/s": 10e9, "1 Gbit/s": 1e9, "100 Mbit/s": 100e6}
# The grid of Table 1 of the paper (arXiv:2502.06728).
TOP_KS = (1, 2, 4, 8, 16, 32)
# A product's backward has two products of its size, so backward is two thirds of the arithmetic of a step.
_BACKWARD_SHARE = 2 / 3
_ALL_REDUCE_ITEMSIZE = 2
# Two nodes exchange whole messages, whatever they are; from this number on it depends.
_MANY = 3


@dataclass(frozen=True, kw_only=True)
class NodeTraffic:
    """Bytes of one node in one step, all its ranks together; means where an exchange takes place less often."""

    gathered: float  # Messages that go to each other node as they are.
    reduced: float  # Messages that are added up on the way: of R nodes each gets and adds up 1 / R of them.
    returned: float  # The sums of all that is added up, which come back.
    dense: float  # What of `gathered` and `reduced` belongs to parameters that are not compressed.
    # Over the link of the node, by `sent_bytes`; by formula `(R - 1) * gathered + (R - 1) / R * (reduced + returned)`.
    sent: float

    @property
    def message(self) -> float:
        """What the node has to say, whatever the number of others."""
        return self.gathered + self.reduced

    def break_even(self, other: NodeTraffic) -> float | None:
        """Number of nodes from which on ``other``, where all is added up, sends less; ``None`` if it never does.

        With ``g = gathered``, ``a = reduced + returned``: ``(R - 1) g + (R - 1) / R a = (R - 1) / R a'`` has the
        solution ``R = (a' - a) / g``. With b bits per parameter that are all gathered, and 16 bits there and 16 bits
        back in the all-reduce, it is ``R = 32 / b``.
        """
        saved = other.reduced + other.returned - self.reduced - self.returned
        if not self.gathered:
            return None if saved >= 0 else 0.0
        return max(0.0, saved / self.gathered)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to exchange, for the table."""

    config: FlexDeMoConfig | None  # What it stands for; `None`: the all-reduce of hybrid sharding.
    traffic: NodeTraffic  # Bytes.
    bits_per_parameter: float  # Of one message, over all trained parameters.
    is_asked: bool = False  # Whether it is what the user has configured.


@dataclass(frozen=True, kw_only=True)
class SlowLinks:
    """All that ``plan`` says about the exchange between nodes."""

    config: FlexDeMoConfig  # What the user has configured.
    num_nodes: int  # Of the replicate axis.
    compressed: tuple[int, int]  # Number of parameters and of elements that the replicator takes.
    dense: tuple[int, int]  # Number of parameters and of elements that travel as they are.
    all_reduce: Row  # Hybrid sharding.
    rows: tuple[Row, ...]  # FlexDeMo, the user's first.
    compute_seconds: float | None  # Forward and backward of one step; `None` if unknown.

    def exchange_seconds(self, row: Row, bits_per_second: float) -> float:
        """Of what a node sends in one step, at the full rate of its link, without latency."""
        return 8 * row.traffic.sent / bits_per_second

    def step_seconds(self, row: Row, bits_per_second: float) -> float:
        """Of forward, backward and exchange; of the exchange alone if the former are unknown.

        Behind backward: ``C / 3 + max(2 C / 3, E)``, one after the other: ``C + E``, one step late: ``max(C, E)``, with
        C seconds of arithmetic and E seconds of exchange.
        """
        exchange, compute = self.exchange_seconds(row, bits_per_second), self.compute_seconds
        if compute is None:
            return exchange
        if row.config is not None and _is_late(row.config):
            return max(compute, exchange)
        if row.config is not None and not _hides_behind_backward(row.config):
            return compute + exchange
        backward = _BACKWARD_SHARE * compute
        return compute - backward + max(backward, exchange)


def _is_late(config: FlexDeMoConfig) -> bool:
    """Whether an exchange has until the next one begins."""
    return config.delay > 0 or (isinstance(config.replicator, DiLoCo) and config.replicator.overlap)


def _hides_behind_backward(config: FlexDeMoConfig) -> bool:
    # Weights can be averaged when a step is complete, not before.
    return config.overlap != "step" and not isinstance(config.replicator, LocalSteps)


def slow_links(
    model: ModelShapes, mesh: Mesh, config: FlexDeMoConfig, *, compute_seconds: float | None = None
) -> SlowLinks:
    """Count what FlexDeMo and the all-reduce of hybrid sharding send.

    Args:
        model: Shapes.
        mesh: Nodes (``replicate``) of so many ranks each (``shard``).
        config: Of the optimizer.
        compute_seconds: Forward and backward of one step, without any exchange between nodes.

    Raises:
        ValueError: If nothing is trained.
    """
    trained = [parameter for parameter in model.parameters if not parameter.frozen]
    numel = sum(math.prod(parameter.shape) for parameter in trained)
    if not numel:
        raise ValueError(f"{model.name} has no parameters that are trained, so there is nothing to plan")
    dense = [parameter for parameter in trained if is_dense(_whole(parameter), config.dense_below)]
    dense_numel = sum(math.prod(parameter.shape) for parameter in dense)
    rows: list[Row] = []
    for index, each in enumerate(comparison(config)):
        traffic = node_traffic(trained, mesh, each)
        rows.append(
            Row(config=each, traffic=traffic, bits_per_parameter=8 * traffic.message / numel, is_asked=index == 0)
        )
    return SlowLinks(
        config=config,
        num_nodes=mesh.replicate,
        compressed=(len(trained) - len(dense), numel - dense_numel),
        dense=(len(dense), dense_numel),
        all_reduce=Row(
            config=None,
            traffic=_summed_up(_ALL_REDUCE_ITEMSIZE * numel, mesh.replicate),
            bits_per_parameter=8 * _ALL_REDUCE_ITEMSIZE,
        ),
        rows=tuple(rows),
        compute_seconds=compute_seconds,
    )


def comparison(config: FlexDeMoConfig) -> Iterator[FlexDeMoConfig]:
    """The user's config, then DCTTopK with other numbers of coefficients, then other formats of the user's."""
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
    """What the ranks of one node send, counted by the layout of the optimizer's own messages.

    Args:
        trained: Parameters, in the order of the forward pass.
        mesh: Sizes.
        config: Of the optimizer.
    """
    if isinstance(config.replicator, LocalSteps):
        numel = sum(math.prod(parameter.shape) for parameter in trained)
        return _summed_up(config.replicator.bits_per_parameter() / 8 * numel, mesh.replicate)
    gathered = reduced = returned = dense = sent = 0
    for shapes, num_ranks in shard_shapes(trained, mesh.shard):
        for plan, count in _distinct(_bucket_plans(shapes, config)):
            number = num_ranks * count
            if is_summed(plan, _MANY):
                reduced += number * message_bytes(plan)
                returned += number * returned_dtype(plan).itemsize * sum(p.num_blocks * p.num_sent for p in plan.parts)
            else:
                gathered += number * message_bytes(plan)
            # The first node adds up the longest segments.
            sent += number * sent_bytes(plan, 0, mesh.replicate)
            dense += number * _dense_bytes(plan, shapes, config.dense_below)
    return NodeTraffic(gathered=gathered, reduced=reduced, returned=returned, dense=dense, sent=sent)


def _distinct(plans: Iterable[BucketPlan]) -> Iterator[tuple[BucketPlan, int]]:
    """One of all buckets whose messages have the same form, and their number."""
    kinds: dict[tuple[object, ...], list[BucketPlan]] = {}
    for plan in plans:
        key = tuple((type(p.replicator), id(p.values), p.num_blocks, p.block_numel) for p in plan.parts)
        kinds.setdefault(key, []).append(plan)
    return ((same[0], len(same)) for same in kinds.values())


def shard_shapes(trained: Sequence[ParameterShape], num_shards: int) -> Iterator[tuple[list[Shape], int]]:
    """Shapes of the shards of one rank, and how many ranks of a node have the same."""
    coordinates = [(rank,) for rank in range(num_shards)]
    distinct = {(p.shape, p.shard_dim): index for index, p in enumerate(trained) if p.shape}
    places = {key: place for place, key in enumerate(distinct)}
    columns = [held_boxes(shape, (num_shards,), (Shard(dim),), coordinates) for shape, dim in distinct]
    for boxes, count in Counter(zip(*([box.shape for box in column] for column in columns), strict=True)).items():
        yield [Shape(p.shape, boxes[places[p.shape, p.shard_dim]] if p.shape else ()) for p in trained], count


def _bucket_plans(shapes: Sequence[Shape], config: FlexDeMoConfig) -> list[BucketPlan]:
    replicator = config.replicator
    assert isinstance(replicator, Replicator)
    return plan_buckets(
        shapes,
        replicator=replicator,
        value_format_name=config.value_format,
        dense_below=config.dense_below,
        chunk_bytes=config.chunk_bytes,
    )


def _dense_bytes(plan: BucketPlan, shapes: Sequence[Shape], dense_below: int) -> int:
    return sum(aligned(part.value_bytes) for part in plan.parts if is_dense(shapes[part.places[0].number], dense_below))


def _summed_up(num_bytes: float, num_nodes: int) -> NodeTraffic:
    """A ring all-reduce of ``num_bytes``, of which all is dense."""
    sent = 2 * (num_nodes - 1) / num_nodes * num_bytes
    return NodeTraffic(gathered=0, reduced=num_bytes, returned=num_bytes, dense=num_bytes, sent=sent)


def _whole(parameter: ParameterShape) -> Shape:
    return Shape(parameter.shape, parameter.shape)


def slow_links_as_text(links: SlowLinks) -> str:
    """A table with a row for each way to exchange, and what its columns mean."""
    unit = "GB" if links.all_reduce.traffic.message >= 100 * _SCALES["GB"] else "MB"
    sizes = (f"total {unit}", f"dense {unit}", f"sent {unit}")
    header = ("exchange", "values", "bits", *sizes, "/ HSDP", "break-even", *LINKS)
    rows = [_line(links, row, _SCALES[unit]) for row in (links.all_reduce, *links.rows)]
    return "\n".join([*_head(links), "", table(header, rows, left=(0, 1)), *_caption(links)])


def slow_links_as_dict(links: SlowLinks) -> dict[str, Any]:
    """Everything, for ``--json``: bytes, bits and seconds."""
    return {
        "nodes": links.num_nodes,
        "base": links.config.base,
        "compressed": {"parameters": links.compressed[0], "elements": links.compressed[1]},
        "dense": {"parameters": links.dense[0], "elements": links.dense[1]},
        "compute_seconds": links.compute_seconds,
        "all_reduce": _row_as_dict(links, links.all_reduce),
        "rows": [_row_as_dict(links, row) for row in links.rows],
    }


def _row_as_dict(links: SlowLinks, row: Row) -> dict[str, Any]:
    return {
        "name": exchange_name(row),
        "value_format": _value_format(row),
        "is_asked": row.is_asked,
        "bits_per_parameter": row.bits_per_parameter,
        "bytes": {**asdict(row.traffic), "message": row.traffic.message},
        "break_even_nodes": None if row.config is None else row.traffic.break_even(links.all_reduce.traffic),
        "exchange_seconds": {name: links.exchange_seconds(row, rate) for name, rate in LINKS.items()},
        "step_seconds": {name: links.step_seconds(row, rate) for name, rate in LINKS.items()},
    }


def exchange_name(row: Row) -> str:
    """``DCTTopK(64, 8)``: the replicator with the options that count."""
    if row.config is None:
        return "HSDP, all-reduce"
    replicator = row.config.replicator
    values = [str(getattr(replicator, key)) for key in _COUNTED if hasattr(replicator, key)]
    if isinstance(replicator, Random | Striding | Slicing):
        # What rates are rounded to.
        values.append(f"1/{period(replicator.rate)}")
    return f"{type(replicator).__name__}({', '.join(values)})"


def _value_format(row: Row) -> str:
    if row.config is None:
        return "bf16"
    return "fp32" if isinstance(row.config.replicator, LocalSteps) else row.config.value_format


def _line(links: SlowLinks, row: Row, scale: float) -> tuple[str, ...]:
    traffic, reference = row.traffic, links.all_reduce.traffic
    at = traffic.break_even(reference)
    return (
        f"{exchange_name(row)} *" if row.is_asked else exchange_name(row),
        _value_format(row),
        f"{row.bits_per_parameter:.3f}",
        _size(traffic.message / scale),
        _size(traffic.dense / scale),
        _size(traffic.sent / scale),
        f"{traffic.sent / reference.sent:.4f}" if reference.sent else "-",
        "-" if row.config is None else "never" if at is None else f"{at:,.1f}",
        *(_seconds(links.step_seconds(row, rate)) for rate in LINKS.values()),
    )


def _size(number: float) -> str:
    return f"{number:,.3f}" if number < 10 else f"{number:,.1f}"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:,.2f} s" if value < 1000 else f"{value:,.0f} s"
    return f"{1e3 * value:,.2f} ms" if value < 0.1 else f"{1e3 * value:,.0f} ms"


def _head(links: SlowLinks) -> list[str]:
    config = links.config
    late = f", {config.delay} step late" if config.delay else ""
    lines = (
        f"{links.num_nodes} nodes (replicate axis); base {config.base}, overlap={config.overlap}{late}",
        f"compressed: {links.compressed[0]} parameters with {links.compressed[1]:,} elements; dense: {links.dense[0]} "
        f"parameters with {links.dense[1]:,} elements (less than two dimensions, or fewer than {config.dense_below} "
        "elements)",
    )
    return [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines]


def _caption(links: SlowLinks) -> list[str]:
    compute = links.compute_seconds
    times = (
        "Times are those of the exchange alone (give forward and backward with --compute-seconds)"
        if compute is None
        else f"Times are those of a step with {_seconds(compute)} of forward and backward"
    )
    lines = (
        "* the configured one. bits: per parameter. total: what a node has to say, all its ranks together; dense: part "
        "of it. MB: 10^6 bytes.",
        "sent by the busiest of R nodes: (R - 1) x what goes to each other node (components at indices of their own) "
        "+ 2 (R - 1) / R x what is added up on the way (values at common indices; the all-reduce of HSDP, in bf16).",
        "break-even: from this number of nodes on the all-reduce of HSDP sends less; 32 / bits if nothing is added up "
        "on the way.",
        f"{times}, at the full rate of one link for each node, without latency, checks, codec and what travels "
        "inside a node.",
    )
    overlap = (
        "C of arithmetic and E of exchange take C / 3 + max(2 C / 3, E) if the exchange hides behind backward (HSDP, "
        'overlap="backward"), C + E with overlap="step", max(C, E) with delay=1.'
    )
    shown = lines if compute is None else (*lines, overlap)
    return ["", *(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in shown)]
