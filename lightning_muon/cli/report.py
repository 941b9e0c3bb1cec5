"""``lightning-muon report``: one HTML page of one or several runs, which loads nothing and can be sent to anybody."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from lightning_muon.cli.logged_run import Curve, LoggedRun
from lightning_muon.config import join_names
from lightning_muon.monitor import html
from lightning_muon.monitor.step_monitor import FOLDER, PARTS
from lightning_muon.monitor.timeline import Recording, predict, read_parts
from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.draw import rows_shown
from lightning_muon.schedule.program import Op

_DESCRIPTION = """Write one HTML page, which needs no network, from the folders of runs: curves over steps and seconds,
learning rates, parts of an optimizer step, a measured step above the planned one, bytes, and balance of the owners. A
folder has metrics.csv of Lightning's CSVLogger (or, of transformers, trainer_state.json or folders checkpoint-N with
one), what MuonMonitor has written, and samples.json if the program writes one: a list of objects, each a row of a
table. Several folders are drawn in the same pictures."""
_PAGE = "report.html"
_MOST_SAMPLES = 20
_MOST_APART = 3.0  # Timelines that are drawn on one axis.
# Title of a picture -> beginnings of the names that are drawn in it.
_PICTURES = {
    "learning rates": ("lr", "learning_rate", "muon_lr/"),
    "update, root mean square": ("update_rms/",),
    "weight, root mean square": ("weight_rms/",),
    "orthogonality error": ("orthogonality_error",),
    "optimizer, milliseconds": ("optimizer_ms/",),
    "tokens per second": ("tokens_per_second",),
    "TFLOP/s per rank": ("tflops/",),
    "model FLOPs utilization": ("mfu/",),
    "skipped steps": ("skipped_steps",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description, add = _DESCRIPTION, parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN_DIR", help="folder of a run, or one with its version_0, ...")
    add("--out", type=Path, metavar="FILE.html", help="where to write it (default report.html in the first folder)")
    add(
        "--cost",
        type=Path,
        metavar="FILE.json",
        help="rates for the planned step, as `trace` writes them; or cost.json in the folder, or a preset",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the page, and say where, and what it leaves out."""
    runs = _read_runs(arguments.runs)
    path = _write(runs, arguments.out or arguments.runs[0] / _PAGE, arguments.cost)
    sys.stdout.write("".join(f"{line}\n" for line in (*chain(*(each.notes for each in runs)), f"wrote {path}")))


def write_report(runs: Sequence[Path], out: Path | None = None, *, cost: Path | None = None) -> Path:
    """Write the report of these folders, and return where it is.

    Raises a ``FileNotFoundError`` for a folder without metrics, a ``ValueError`` for files that cannot be read or that
    have nothing to draw, and an ``OSError`` for an ``out`` that cannot be written.
    """
    return _write(_read_runs(runs), out or runs[0] / _PAGE, cost)


def _read_runs(folders: Sequence[Path]) -> list[LoggedRun]:
    runs = [LoggedRun.read(folder) for folder in folders]
    for each in runs:  # For several runs, with the folder above: many are called version_0.
        each.name = "/".join(each.folder.resolve().parts[-min(2, len(runs)) :])
        if not (each.curves or each.measured or each.samples):
            raise ValueError(
                f"{each.problem}, and MuonMonitor has measured no step there; if the run has just begun, wait until it "
                "has logged something, otherwise give the folder that the CSVLogger of a Trainer has written to"
            )
    return runs


def _write(runs: Sequence[LoggedRun], path: Path, cost: Path | None) -> Path:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file for the page, such as {path / _PAGE}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for {path.name}; make it, or name another file")
    path.write_text(html.page(f"Report of {', '.join(each.name for each in runs)}", _sections(runs, cost)), "utf-8")
    return path


def _sections(runs: Sequence[LoggedRun], cost: Path | None) -> list[tuple[str, str]]:
    metrics = list(dict.fromkeys(name for each in runs for name in each.curves))
    losses = [name for name in metrics if _is_loss(name)]
    others = [name for name in metrics if not _is_loss(name) and not is_of_optimizer(name)]
    by_step = [html.curves(name, _series(runs, [name]), "step") for name in losses]
    by_time = [html.curves(name, _series(runs, [name], by_seconds=True), "seconds of training") for name in losses]
    found = [("Notes", html.paragraphs(note for each in runs for note in each.notes))]
    texts = html.paragraphs([*_without_loss(runs), *_not_finite(runs, losses)])
    found.append(("Loss", html.grid([each for pair in zip(by_step, by_time, strict=True) for each in pair]) + texts))
    pictures = [html.curves(name, _series(runs, [name]), "step") for name in others]
    for title, beginnings in _PICTURES.items():
        pictures.append(html.curves(title, _series(runs, [m for m in metrics if m.startswith(beginnings)]), "step"))
    texts = html.paragraphs(_not_finite(runs, [name for name in metrics if not _is_loss(name)]))
    found.append(("Rates and other metrics", html.grid(pictures) + texts))
    for each in runs:
        found += [(f"{title}: {each.name}", text) for title, text in (*_of_monitor(each), *_of_timeline(each, cost))]
    for each in runs:
        if each.samples:
            columns = list(dict.fromkeys(key for sample in each.samples for key in sample))
            rows = [[sample.get(key, "") for key in columns] for sample in each.samples[:_MOST_SAMPLES]]
            found.append((f"Samples: {each.name}", html.table(columns, rows)))
    found.append(("Last values", _last_values(runs, metrics)))
    return [(title, text) for title, text in found if text]


def _without_loss(runs: Sequence[LoggedRun]) -> Iterator[str]:
    """A sentence for each run that has logged no loss."""
    for each in runs:
        if not any(map(_is_loss, each.curves)):
            reason = each.problem or 'no metric has "loss" in its name'
            yield f"{f'{each.name}: ' if len(runs) > 1 else ''}no loss is drawn, since {reason}"


def _not_finite(runs: Sequence[LoggedRun], metrics: Sequence[str]) -> Iterator[str]:
    """A sentence for each curve that has a NaN or an infinite value, which no picture shows."""
    for each in runs:
        for metric in metrics:
            curve = each.curves.get(metric, [])
            steps = [f"{step:.0f}" for step, value in curve if not math.isfinite(value)]
            if not steps:
                continue
            if all(not math.isfinite(value) for _, value in curve[-len(steps) :]):
                where = f"from step {steps[0]} on"
            else:
                where = f"at {'steps' if len(steps) > 1 else 'step'} {join_names(steps)}"
            yield f"{f'{each.name} ' if len(runs) > 1 else ''}{metric}: not finite {where}"


def _is_loss(name: str) -> bool:
    return "loss" in name.lower()


def is_of_optimizer(name: str) -> bool:
    """Whether a metric is one of the optimizer, such as those of ``MuonMonitor``."""
    return name.startswith(tuple(chain(*_PICTURES.values(), ("bytes/",))))


def _series(runs: Sequence[LoggedRun], metrics: Sequence[str], *, by_seconds: bool = False) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    all_alike = len({metric.partition("/")[0] for metric in metrics}) == 1
    for each in runs:
        for metric in metrics:
            label = metric.partition("/")[2] if all_alike else metric
            name = " ".join(([each.name] if len(runs) > 1 else []) + ([label] if len(metrics) > 1 else []))
            curve = each.curves.get(metric, [])
            found[name or metric] = each.over_seconds(curve) if by_seconds else curve
    return found


def _last_values(runs: Sequence[LoggedRun], metrics: Sequence[str]) -> str:
    rows: list[list[str]] = []
    for metric in metrics:
        last = [each.curves[metric][-1][1] if metric in each.curves else None for each in runs]
        rows.append([metric, *("" if value is None else f"{value:.5g}" for value in last)])
    return html.table(["metric", *(each.name for each in runs)], rows) if rows else ""


def _of_monitor(each: LoggedRun) -> Iterable[tuple[str, str]]:
    """Parts, bytes and balance of the last step that MuonMonitor has measured."""
    if not each.measured:
        return
    line = each.measured[-1]
    values, when = line["values"], f"step {line['step']}"
    parts = {
        part: values[key]
        for part in (*PARTS, "exposed_communication", "other", "total")
        if (key := f"optimizer_ms/{part}") in values
    }
    sent = {key.removeprefix("bytes/"): value / 1e6 for key, value in values.items() if key.startswith("bytes/")}
    figures = [html.bars(f"optimizer, mean over the ranks, {when}", parts, "ms")] if parts else []
    figures += [html.bars(f"sent by a rank over each axis, {when}", sent, "MB")] if sent else []
    yield "Parts of a step, bytes", html.grid(figures)
    loads = {"newton_schulz_gflop": "GFLOP", "newton_schulz_ms": "ms"}
    balance = [
        html.bars(
            f"Newton-Schulz by owner, {when}", {f"rank {rank}": value for rank, value in enumerate(line[key])}, unit
        )
        for key, unit in loads.items()
        if any(line.get(key, ()))
    ]
    yield "Balance of the owners", html.grid(balance)


def _of_timeline(each: LoggedRun, cost: Path | None) -> Iterable[tuple[str, str]]:
    found = read_parts(each.place / FOLDER)
    if found is None:
        return
    step, device_type, recording = found
    own = each.place / "cost.json"
    cost = cost or (own if own.exists() else None)
    if cost is None:
        rates, of_rates = PRESETS["cpu" if device_type == "cpu" else "reference"], "preset"
    else:
        rates, of_rates = CostModel.read(cost), str(cost)
    planned = predict(recording, rates, device_type=device_type)
    pictures: list[str] = []
    spans = recording.timeline.makespan, planned.makespan
    end = max(spans) if max(spans) < _MOST_APART * min(spans) else 0.0  # Separate axes if lengths differ much.
    for title, timeline in (("measured", recording.timeline), (f"planned ({of_rates})", planned)):
        lanes = [html.Lane(name=f"{title}: {1e3 * timeline.makespan:.4g} ms, idle {timeline.idle:.0%}")]
        lanes += html.lanes_of(timeline, lambda rank, op: _about(recording, rank, op), rows_shown(timeline))
        pictures.append(html.timeline_svg(lanes, end))
    yield f"Timeline of step {step}", "".join(pictures) + html.legend_of(recording.timeline.spans.values())


def _about(recording: Recording, rank: int, op: Op) -> str:
    """Tooltip with matrices, FLOPs and bytes of an op."""
    names = recording.matrices.get(rank, {}).get(op.name, [])
    lines = [join_names(names, separator="\n")] if names else []
    lines += [f"{op.cost / 1e9:.3g} GFLOP"] if op.cost else []
    return "\n".join(lines + ([f"{op.bytes / 1e6:.3g} MB"] if op.bytes else []))
