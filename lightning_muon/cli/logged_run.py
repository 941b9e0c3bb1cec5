"""What a training has logged in its folder: metrics of a logger or of transformers, lines of MuonMonitor, samples."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_muon.config import join_names
from lightning_muon.monitor.step_monitor import FOLDER, LINES
from lightning_muon.monitor.timeline import reading

_METRICS, _HISTORY, _SAMPLES = "metrics.csv", "trainer_state.json", "samples.json"
_VERSION, _CHECKPOINT = re.compile(r"version_(\d+)"), re.compile(r"checkpoint-(\d+)")
_NO_METRICS = {"step", "epoch", "seconds"}
# Columns of transformers that are no metrics.
_NO_METRICS |= {"total_flos", "train_runtime", "num_input_tokens_seen"}
_MOST_LETTERS = 60  # Of a wrong first line.

Curve = list[tuple[float, float]]


@dataclass(eq=False)
class LoggedRun:
    """The logged data of a run in a folder."""

    folder: Path
    curves: dict[str, Curve] = field(default_factory=dict[str, Curve])  # Metric -> (step, value), by step.
    times: Curve = field(default_factory=Curve)  # (Step, seconds of training), by step.
    measured: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # Lines of MuonMonitor.
    samples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    problem: str = ""  # Why no logger has given curves.
    notes: list[str] = field(default_factory=list[str])  # What a reader should know of the data.
    name: str = ""

    @classmethod
    def read(cls, folder: Path) -> LoggedRun:
        """Read the files of a folder, or of the newest ``version_*`` in it or in the only folder in it that has some.

        Of a step that was logged twice, since the run was resumed from an earlier one, the later row counts.

        Raises:
            FileNotFoundError: There is no run, or there are several of different names.
            ValueError: A file is not what a run writes.
        """
        folder, notes = _newest(folder)
        found = cls(folder, notes=notes)
        found._read_metrics()
        with reading(lines := found.place / FOLDER / LINES):
            found._read_monitor(lines)
        for name, curve in found.curves.items():
            found.curves[name] = sorted(dict(curve).items())
        found.times = _continued(found.times)
        with reading(path := found.place / _SAMPLES):
            if path.exists():
                found.samples = list(map(dict, json.loads(path.read_text(encoding="utf-8"))))
        return found

    @property
    def place(self) -> Path:
        """Folder of the monitor and of other files of the run: for a checkpoint of transformers the one around it."""
        own = self.folder.resolve()
        is_inside = _CHECKPOINT.fullmatch(own.name) and not (own / FOLDER).exists() and (own.parent / FOLDER).exists()
        return own.parent if is_inside else self.folder

    def _read_metrics(self) -> None:
        """Take over the rows that a logger, or the Trainer of transformers, has written."""
        path = _metrics_of(self.folder)
        if path is None:
            self.problem = f"{self.folder} has no {_METRICS} of a CSVLogger and no {_HISTORY} of transformers"
            return
        with reading(path):
            table, self.problem = _csv_rows(path) if path.name == _METRICS else _history_rows(path)
        for row in map(_numbers, table):
            step = row.get("step", math.nan)
            if not math.isfinite(step):
                continue
            for name, value in row.items():
                if name not in _NO_METRICS:
                    self.curves.setdefault(name, []).append((step, value))
            if "seconds" in row:
                self.times.append((step, row["seconds"]))
        if not self.curves and not self.problem:
            self.problem = f"{path} has no numbers beside step and epoch"
        self.notes += filter(None, [_about_resuming(path, self.curves.values())])

    def _read_monitor(self, path: Path) -> None:
        """Take over the lines of a monitor; the last one may be half, of a process that was killed."""
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
        for number, line in enumerate(lines[:-1], start=1):
            try:
                self.measured.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
        has_metrics = (self.folder / _METRICS).exists()
        has_times = bool(self.times)
        for line in self.measured:
            if not has_times:  # Of Lightning's loggers the first step is 0.
                self.times.append((line["step"] - int(has_metrics), line["seconds"]))
            for name, value in line["values"].items() if not has_metrics else ():
                self.curves.setdefault(name, []).append((line["step"], value))

    def over_seconds(self, curve: Curve) -> Curve:
        """The curve over the seconds of training, by linear interpolation of known times; empty without them."""
        times = [(0.0, 0.0), *self.times]
        if len(times) < 3:
            return []
        moved: Curve = []
        for step, value in curve:
            after = min(max(bisect_left(times, (step,)), 1), len(times) - 1)
            (first, begun), (last, ended) = times[after - 1], times[after]
            share = (step - first) / (last - first) if last > first else 1.0
            moved.append((begun + share * (ended - begun), value))
        return moved


def is_run(folder: Path) -> bool:
    """Whether a folder itself has files of a run."""
    return (folder / FOLDER).exists() or _metrics_of(folder) is not None


def _has_content(folder: Path) -> bool:
    """Whether something is logged in the folder of a run: a monitor makes its folder at once."""
    paths = (_metrics_of(folder), folder / FOLDER / LINES)
    return any(path is not None and path.exists() and path.stat().st_size > 0 for path in paths)


def _newest(folder: Path) -> tuple[Path, list[str]]:
    """The folder with the files of the newest run, and what to say about other runs beside it."""
    if is_run(folder):
        return folder, []
    versions = _versions(folder)
    if not any(map(is_run, versions)):
        named = sorted(path for path in folder.glob("*/") if any(map(is_run, _versions(path))))
        if len(named) > 1:
            raise FileNotFoundError(
                f"{folder} has runs in several folders; name those to compare: lightning-muon report "
                f"{shlex.join(map(str, named))}"
            )
        versions = _versions(named[0]) if named else versions
    runs = [path for path in versions if is_run(path)]
    begun = [path for path in runs if _has_content(path)]
    runs = begun or runs
    if not runs:
        raise FileNotFoundError(
            f"{folder} has no {_METRICS}, {_HISTORY}, {FOLDER}, nor folders version_0, ... or checkpoint-N with them; "
            "give the folder that the CSVLogger of a Trainer has written to, or train with MuonMonitor"
        )
    *left_out, newest = runs
    notes: list[str] = []
    if left_out:
        both = shlex.join(map(str, (left_out[-1], newest)))
        notes.append(
            f"{newest} is the newest run in {newest.parent}; left out: {join_names([each.name for each in left_out])}. "
            f"To draw runs in the same pictures, name them: lightning-muon report {both}"
        )
    if later := [path.name for path in versions[versions.index(newest) + 1 :]]:
        notes.append(f"{join_names(later)} in {newest.parent}: nothing that can be drawn has been written there yet")
    return newest, notes


def _versions(folder: Path) -> list[Path]:
    return _numbered(folder, _VERSION)


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Folders whose names fit a pattern with a number, the newest last."""
    found = [(int(match[1]), path) for path in folder.glob("*/") if (match := pattern.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def _metrics_of(folder: Path) -> Path | None:
    """The file with the metrics of the run in a folder.

    A Trainer of transformers writes one into each checkpoint, with all that it has logged; into the folder itself only
    if the program calls ``save_state``.
    """
    if (folder / _METRICS).exists():
        return folder / _METRICS
    checkpoints = (path / _HISTORY for path in reversed(_numbered(folder, _CHECKPOINT)))
    newest = next((path for path in checkpoints if path.exists()), None)
    own = folder / _HISTORY
    if newest is None or not own.exists():
        return newest or (own if own.exists() else None)
    return max(own, newest, key=_last_step)


def _last_step(path: Path) -> int:
    with reading(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        return max([content.get("global_step", 0), *(row["step"] for row in content["log_history"] if "step" in row)])


def _csv_rows(path: Path) -> tuple[list[Mapping[str, Any]], str]:
    """The rows of a CSVLogger, and what is wrong with the file if it is no table of metrics."""
    text = path.read_bytes().decode("utf-8-sig")
    if not text.strip():
        return [], f"{path} is empty"
    if "\r\n" in text:  # As a logger ends all lines; the last one may be half, while it writes or if it was killed.
        text = text[: text.rfind("\n") + 1]
    table = csv.DictReader(io.StringIO(text, newline=""))
    if "step" not in (table.fieldnames or ()):
        first = text.strip().splitlines()[0]
        return [], f"{path} is no table of metrics: its first line, {first[:_MOST_LETTERS]!r}, names no column step"
    rows: list[Mapping[str, Any]] = list(table)
    return rows, "" if rows else f"{path} has a first line with names and no other lines"


def _history_rows(path: Path) -> tuple[list[Mapping[str, Any]], str]:
    rows: list[Mapping[str, Any]] = list(map(dict, json.loads(path.read_text(encoding="utf-8"))["log_history"]))
    return rows, "" if rows else f"log_history in {path} is empty"


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in row.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):  # Empty, or a text.
            continue
    return found


def _about_resuming(path: Path, curves: Iterable[Curve]) -> str:
    """Where the rows of a file go back to an earlier step, if they do."""
    for curve in curves:
        for (before, _), (step, _) in pairwise(curve):
            if step < before:
                last, end = curve[-1][0], max(step for step, _ in curve)
                tail = f", and those after step {last:.0f} are of the run before" if end > last else ""
                return (
                    f"{path} goes back from step {before:.0f} to step {step:.0f}, as that of a resumed run does; of "
                    f"steps that are there twice the later values are drawn{tail}"
                )
    return ""


def _continued(times: Sequence[tuple[float, float]]) -> Curve:
    """Times by step: where the clock of a resumed run began anew it goes on, and steps that it repeats count once."""
    found: Curve = []
    begun = last = before = 0.0
    for step, seconds in times:
        if seconds < before:
            begun = last
        before, last = seconds, begun + seconds
        while found and found[-1][0] >= step:
            found.pop()
        found.append((step, last))
    return found
