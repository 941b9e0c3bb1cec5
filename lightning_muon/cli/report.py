"""``lightning-muon report``: one HTML page of one or several runs, which loads nothing and can be sent to anybody."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from lightning_muon.config import join_names
from lightning_muon.monitor import html
from lightning_muon.monitor.step_monitor import FOLDER, LINES, PARTS
from lightning_muon.monitor.timeline import Recording, predict, read_parts
from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.draw import rows_shown
from lightning_muon.schedule.program import Op

_DESCRIPTION = """Write one HTML page, which needs no network, from the folders of runs: curves over steps and seconds,
learning rates, parts of an optimizer step, a measured step above the planned one, bytes, and balance of the owners. A
folder has metrics.csv of Lightning's CSVLogger (or trainer_state.json of transformers), what MuonMonitor has written
beside it, and samples.json if the program writes one: a list of objects, each a row of a table. Several folders are
drawn in the same pictures."""
_METRICS, _HISTORY, _SAMPLES = "metrics.csv", "trainer_state.json", "samples.json"
_MOST_SAMPLES = 20
_MOST_APART = 3.0  # Timelines that are drawn on one axis.
_NO_METRICS = {"step", "epoch", "seconds"}
# Columns of transformers that are no metrics.
_NO_METRICS |= {"total_flos", "train_runtime", "num_input_tokens_seen"}
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
_Curve = list[tuple[float, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description, add = _DESCRIPTION, parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN_DIR", help="folder of a run, or the one that has its version_0, ...")
    add("--out", type=Path, metavar="FILE.html", help="where to write it (default report.html in the first folder)")
    add(
        "--cost",
        type=Path,
        metavar="FILE.json",
        help="rates for the planned step, as `trace` writes them; or cost.json in the folder, or a preset",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the page, and say where."""
    path = write_report(arguments.runs, arguments.out, cost=arguments.cost)
    sys.stdout.write(f"wrote {path}\n")


def write_report(runs: Sequence[Path], out: Path | None = None, *, cost: Path | None = None) -> Path:
    """Write the report of these folders, and return where it is.

    Raises a ``FileNotFoundError`` for a folder without metrics, a ``ValueError`` for files that cannot be read, and an
    ``OSError`` for an ``out`` that cannot be written.
    """
    read = [LoggedRun.read(folder) for folder in runs]
    for each in read:  # For several runs, with the folder above: many are called version_0.
        each.name = "/".join(each.folder.resolve().parts[-min(2, len(read)) :])
    path = out or runs[0] / "report.html"
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file for the page, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for {path.name}; make it, or name another file")
    path.write_text(html.page(f"Report of {', '.join(each.name for each in read)}", _sections(read, cost)), "utf-8")
    return path


@dataclass(eq=False)
class LoggedRun:
    """The logged data of a run in a folder."""

    folder: Path
    curves: dict[str, _Curve] = field(default_factory=dict[str, _Curve])  # Metric -> (step, value), by step.
    times: _Curve = field(default_factory=_Curve)  # (Step, seconds of training), by step.
    measured: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # Lines of MuonMonitor.
    samples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    name: str = ""

    @classmethod
    def read(cls, folder: Path) -> LoggedRun:
        """Read the files of a folder, or of the newest ``version_*`` in it."""
        known = (_METRICS, _HISTORY, FOLDER)
        if not any((folder / name).exists() for name in known):
            versions = [path for path in folder.glob("version_*") if path.name[8:].isdigit()]
            if not versions:
                raise FileNotFoundError(
                    f"{folder} has no {', '.join(known)}, nor folders version_0, ... with them; give the folder that "
                    "the CSVLogger of a Trainer has written to, or train with MuonMonitor"
                )
            folder = max(versions, key=lambda path: int(path.name[8:]))
        found = cls(folder)
        for row in _rows(folder):
            step = row.get("step", 0.0)
            for name, value in row.items():
                if name not in _NO_METRICS:
                    found.curves.setdefault(name, []).append((step, value))
            if "seconds" in row:
                found.times.append((step, row["seconds"]))
        with _reading(lines := folder / FOLDER / LINES):
            found._read_monitor(lines)
        with _reading(folder / _SAMPLES):
            if (folder / _SAMPLES).exists():
                found.samples = list(map(dict, json.loads((folder / _SAMPLES).read_text(encoding="utf-8"))))
        found.times.sort()
        return found

    def _read_monitor(self, path: Path) -> None:
        """Take over the lines of a monitor; the last one may be half, of a process that was killed."""
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        for number, line in enumerate(lines[:-1], start=1):
            try:
                self.measured.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
        has_metrics = (path.parents[1] / _METRICS).exists()
        has_times = bool(self.times)
        for line in self.measured:
            if not has_times:  # Of Lightning's loggers the first step is 0.
                self.times.append((line["step"] - int(has_metrics), line["seconds"]))
            for name, value in line["values"].items() if not has_metrics else ():
                self.curves.setdefault(name, []).append((line["step"], value))

    def over_seconds(self, curve: _Curve) -> _Curve:
        """The curve over the seconds of training, by linear interpolation of known times; empty without them."""
        times = [(0.0, 0.0), *self.times]
        if len(times) < 3:
            return []
        moved: _Curve = []
        for step, value in curve:
            after = min(max(bisect_left(times, (step,)), 1), len(times) - 1)
            (first, begun), (last, ended) = times[after - 1], times[after]
            share = (step - first) / (last - first) if last > first else 1.0
            moved.append((begun + share * (ended - begun), value))
        return moved


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in which something is missing or no JSON."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not what a run writes: {type(error).__name__}: {error}") from error


def _rows(folder: Path) -> Iterable[dict[str, float]]:
    """Yield the rows that loggers have written, in the order of time."""
    if (folder / _METRICS).exists():
        with (folder / _METRICS).open(newline="", encoding="utf-8") as file:
            table: list[Mapping[str, Any]] = list(csv.DictReader(file))
    elif (folder / _HISTORY).exists():
        with _reading(folder / _HISTORY):
            table = list(map(dict, json.loads((folder / _HISTORY).read_text(encoding="utf-8"))["log_history"]))
    else:
        table = []
    for row in table:
        numbers: dict[str, float] = {}
        for name, value in row.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError):  # Empty, or a text.
                continue
        yield numbers


def _sections(runs: Sequence[LoggedRun], cost: Path | None) -> list[tuple[str, str]]:
    metrics = list(dict.fromkeys(name for each in runs for name in each.curves))
    losses = [name for name in metrics if "loss" in name.lower()]
    others = [name for name in metrics if name not in losses and not is_of_optimizer(name)]
    by_step = [html.curves(name, _series(runs, [name]), "step") for name in losses]
    by_time = [html.curves(name, _series(runs, [name], by_seconds=True), "seconds of training") for name in losses]
    found = [("Loss", html.grid([each for pair in zip(by_step, by_time, strict=True) for each in pair]))]
    pictures = [html.curves(name, _series(runs, [name]), "step") for name in others]
    for title, beginnings in _PICTURES.items():
        pictures.append(html.curves(title, _series(runs, [m for m in metrics if m.startswith(beginnings)]), "step"))
    found.append(("Rates and other metrics", html.grid(pictures)))
    for each in runs:
        found += [(f"{title}: {each.name}", text) for title, text in (*_of_monitor(each), *_of_timeline(each, cost))]
    for each in runs:
        if each.samples:
            columns = list(dict.fromkeys(key for sample in each.samples for key in sample))
            rows = [[sample.get(key, "") for key in columns] for sample in each.samples[:_MOST_SAMPLES]]
            found.append((f"Samples: {each.name}", html.table(columns, rows)))
    found.append(("Last values", _last_values(runs, metrics)))
    return [(title, text) for title, text in found if text]


def is_of_optimizer(name: str) -> bool:
    """Whether a metric is one of the optimizer, such as those of ``MuonMonitor``."""
    return name.startswith(tuple(chain(*_PICTURES.values(), ("bytes/",))))


def _series(runs: Sequence[LoggedRun], metrics: Sequence[str], *, by_seconds: bool = False) -> dict[str, _Curve]:
    found: dict[str, _Curve] = {}
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
        if any(line[key])
    ]
    yield "Balance of the owners", html.grid(balance) if balance else ""


def _of_timeline(each: LoggedRun, cost: Path | None) -> Iterable[tuple[str, str]]:
    found = read_parts(each.folder / FOLDER)
    if found is None:
        return
    step, device_type, recording = found
    own = each.folder / "cost.json"
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
