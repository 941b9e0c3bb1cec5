"""What FlexDeMo sends over slow links, as text at most 120 columns wide and as a dictionary."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from lightning_muon.cli.plan_flexdemo import LINKS, Row, SlowLinks
from lightning_muon.cli.plan_report import WIDTH, table
from lightning_muon.flexdemo.replicator import LocalSteps, period
from lightning_muon.flexdemo.replicators import Random, Slicing, Striding

_SCALES = {"MB": 1e6, "GB": 1e9}
# Options of replicators that make a difference to the bytes, beside the rate.
_COUNTED = ("chunk_size", "top_k", "period")


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
