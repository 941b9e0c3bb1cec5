"""The README.md of a model on the hub: what it is, how it was trained, and the last figures of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from lightning_muon.checkpoint.saving import NAMES
from lightning_muon.cli.report import LoggedRun, is_of_optimizer

_PROJECT = "https://github.com/lightning-muon/lightning-muon"
_VERSIONS = ("lightning_muon", "torch")  # In a manifest.
_NO_SETTINGS = {"params", NAMES}
_LONGEST = 200  # Characters of a value.


@dataclass(frozen=True, kw_only=True)
class Source:
    """The checkpoint and what lies around it.

    Args:
        path: The checkpoint.
        about: What its manifest says of the run; empty without one.
        param_groups: Of its optimizers.
        run: Metrics of the run, if they were found.
        name: Of the model, in the card.
    """

    path: Path
    name: str
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    param_groups: Sequence[Mapping[str, Any]] = ()
    run: LoggedRun | None = None

    @property
    def folders(self) -> list[Path]:
        """Where the run may have left a config or a tokenizer: in the checkpoint, beside it, in the run's folder."""
        return [self.path, self.path.parent, *([self.run.folder] if self.run else [])]


def find_run(source: Path, given: Path | None) -> LoggedRun | None:
    """Metrics of the folder that was ``given``, or of one of the two that ``source`` lies in; else none."""
    if given is not None:
        return LoggedRun.read(given)
    for folder in (source, source.parent, source.parent.parent):
        try:
            found = LoggedRun.read(folder)
        except FileNotFoundError:
            continue
        if found.folder == folder:  # Not the newest of several runs, which another one may be.
            return found
    return None


def model_card(
    class_name: str,
    source: Source,
    content: Mapping[str, Any],
    *,
    base_model: str | None,
    datasets: Sequence[str],
) -> str:
    """The text of README.md, with the front matter that the hub reads.

    Args:
        class_name: Class of transformers.
        source: The checkpoint.
        content: What the checkpoint has beside weights and states: ``epoch``, ``hyper_parameters``.
        base_model: On the hub, that the training began with.
        datasets: On the hub.
    """
    from huggingface_hub import ModelCardData
    from transformers.modelcard import TASK_MAPPING
    from transformers.pipelines import PIPELINE_REGISTRY

    # The task is certain if the class has one only, of those that there still are.
    known = PIPELINE_REGISTRY.get_supported_tasks()
    tasks = [task for task, classes in TASK_MAPPING.items() if class_name in classes.values() and task in known]
    front = ModelCardData(
        library_name="transformers",
        tags=["muon", "lightning-muon"],
        pipeline_tag=tasks[0] if len(tasks) == 1 else None,
        base_model=base_model,
        datasets=list(datasets) or None,
    )
    step = source.about.get("step", content.get("global_step"))
    mesh = dict(source.about.get("mesh", {}))
    ranks = source.about.get("num_ranks") or prod(mesh.values())
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    facts = {
        "class": f"`{class_name}`",
        "optimizer steps": step,
        "epochs begun": content["epoch"] + 1 if {"epoch", "loops"} <= content.keys() else None,
        "ranks": ranks if source.about else None,
        "mesh": axes,
        "checkpoint of": " and ".join(f"{name} {source.about[name]}" for name in _VERSIONS if name in source.about),
    }
    lines = ["---", front.to_yaml(), "---", "", f"# {source.name}", ""]
    lines += [f"Trained with [lightning-muon]({_PROJECT})."]
    lines += _table("The run", ["", ""], [[name, value] for name, value in facts.items() if value not in (None, "")])
    if source.run:
        last = {name: curve[-1] for name, curve in source.run.curves.items() if curve and not is_of_optimizer(name)}
        rows = [[f"`{name}`", f"{value:.5g}", f"{step:.0f}"] for name, (step, value) in sorted(last.items())]
        lines += _table("Last metrics", ["metric", "value", "step"], rows)
    groups = [{k: v for k, v in group.items() if k not in _NO_SETTINGS} for group in source.param_groups]
    settings = list(dict.fromkeys(name for group in groups for name in group))
    heads = ["setting", *(f"group {number}" for number in range(len(groups)))]
    lines += _table("Optimizer", heads, [[f"`{n}`", *(_text(each.get(n)) for each in groups)] for n in settings])
    given = {name: value for name, value in content.get("hyper_parameters", {}).items() if not name.startswith("_")}
    lines += _table("Hyper-parameters", ["name", "value"], [[f"`{name}`", _text(given[name])] for name in given])
    return "\n".join([*lines, ""])


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    if not rows:
        return []
    marks = ["---"] * len(heads)
    return ["", f"## {title}", "", *(f"| {' | '.join(map(str, row))} |" for row in (heads, marks, *rows))]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = text.replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
