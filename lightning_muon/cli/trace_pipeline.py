"""``lightning-muon trace`` of a pipeline: steps of the training that a file describes, drawn above their plan."""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_muon.cli.main import lightning_cli
from lightning_muon.cli.plan_model import read_fit_file
from lightning_muon.cli.table import count
from lightning_muon.integrations.registry import TRAINERS, first_installed
from lightning_muon.monitor.calibrate import duration
from lightning_muon.monitor.timeline import MeasuredSeconds, Recording, StepRecorder, predict, trace_events
from lightning_muon.schedule.draw import draw_timelines
from lightning_muon.schedule.pipeline import PipelineKind
from lightning_muon.schedule.simulate import Timeline

# Options of the command line that are options of the strategy.
_OPTIONS = ("pipeline_size", "pipeline_schedule", "pipeline_microbatches", "replicate_size", "shard_size")
# Options of a Trainer for a few steps that leave no files.
_TRAINER = {
    "callbacks": "null",
    "enable_checkpointing": "false",
    "enable_model_summary": "false",
    "enable_progress_bar": "false",
    "limit_val_batches": "0",
    "logger": "false",
    "max_epochs": "-1",
    "num_sanity_val_steps": "0",
}
_BEHIND_BACKWARD = (PipelineKind.REDUCE_GRAD, PipelineKind.TIED, PipelineKind.GRADIENT_NORM)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--pipeline-size", metavar="P", type=count, help="ranks of a pipeline, instead of the config's")
    add("--pipeline-schedule", metavar="NAME", help="its schedule, instead of the config's")
    add("--pipeline-microbatches", metavar="M", type=count, help="its micro-batches, instead of the config's")


def is_asked_for(arguments: Namespace) -> bool:
    """Whether the training to be traced is a pipeline.

    Raises:
        ValueError: For options of a pipeline where there is none.
    """
    size = arguments.pipeline_size
    if size is None and arguments.config is not None:
        size = _strategy(arguments).get("pipeline_size")
    if isinstance(size, int) and size > 1:
        if arguments.config is None:
            raise ValueError("--pipeline-size needs the model and the data of a training; give --config, not --shapes")
        return True
    for name in ("pipeline_schedule", "pipeline_microbatches"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} means nothing without a pipeline; add --pipeline-size")
    return False


def run(arguments: Namespace) -> None:
    """Train a few steps as ``lightning-muon fit`` does, record all but the first, and write the recording."""
    package = importlib.import_module(first_installed(TRAINERS, "a pipeline is traced with Lightning"))
    recordings: list[Recording] = []
    step = ExitStack()  # The recording of the step that runs.

    class Recorder(package.Callback):
        """Records the steps after the first one, which makes the plan and sends sizes of messages."""

        recorder: StepRecorder | None = None

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step:
                engine = trainer.strategy._running_engine
                self.recorder = StepRecorder(trainer.optimizers[0], engine.pipeline)
                step.enter_context(self.recorder.recording())

        def on_train_batch_end(self, *_: Any) -> None:
            if self.recorder is not None:
                step.close()
                recordings.append(self.recorder.result())

    words = ["fit", "--config", str(arguments.config), f"--trainer.max_steps={arguments.steps + 1}"]
    words += [f"--trainer.{name}={value}" for name, value in _TRAINER.items()]
    if not isinstance(_trainer(arguments).get("strategy"), Mapping):
        words.append("--trainer.strategy=lightning_muon.ParallelMuonStrategy")
    for name in _OPTIONS:
        if (value := getattr(arguments, name)) is not None:
            words.append(f"--trainer.strategy.init_args.{name}={value}")
    with warnings.catch_warnings(), step:
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # Given, since sys.argv is of this command.
        cli = lightning_cli(words, callbacks=[Recorder()], save_config_callback=None)
    if cli.trainer.is_global_zero:
        _write(arguments, cli, recordings)


def _trainer(arguments: Namespace) -> Mapping[str, Any]:
    return read_fit_file(arguments.config)[1]


def _strategy(arguments: Namespace) -> Mapping[str, Any]:
    """Arguments of the strategy in the file."""
    strategy = _trainer(arguments).get("strategy")
    return (strategy.get("init_args") or {}) if isinstance(strategy, Mapping) else {}


def _write(arguments: Namespace, cli: Any, recordings: list[Recording]) -> None:
    """Write pictures, events and a summary of the fastest step: other work on the machine only adds time."""
    if not recordings:
        raise ValueError("no step was recorded: the data of the file end before; add data, or lower --steps")
    fastest, options = min(recordings, key=duration), cli.trainer.strategy.options
    device = cli.trainer.strategy.root_device.type
    measured, planned = fastest.timeline, predict(fastest, MeasuredSeconds(recordings), device_type=device)
    num_data_ranks = len(measured.spans) // options.pipeline_size
    title = (
        f"{type(cli.model).__name__}: {options.pipeline_schedule} on {options.pipeline_size} ranks"
        f"{f' x {num_data_ranks}' if num_data_ranks > 1 else ''}, "
        f"{options.num_microbatches(options.pipeline_size)} micro-batches"
    )
    written = write_recording(arguments.out, fastest, {"measured": measured, "planned": planned}, title)
    steps = " ".join(f"{1e3 * duration(each):.1f}" for each in recordings)
    ratio = planned.makespan / measured.makespan
    lines = [
        title,
        f"measured {_summary(measured)} (fastest of {steps} ms)",
        f"planned  {_summary(planned)}, {ratio:.2f} of measured, with the measured time of each op",
        *(_line_of(rank, measured) for rank in measured.spans),
        f"wrote {written}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def write_recording(folder: Path, recording: Recording, timelines: Mapping[str, Timeline], title: str) -> str:
    """Write events and pictures of a step; events have a "planned" timeline, too, if given. Return the file names."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "trace.json"
    trace.write_text(json.dumps(trace_events(recording, timelines.get("planned"))), encoding="utf-8")
    for suffix in (".png", ".svg"):
        draw_timelines(timelines, folder / f"timeline{suffix}", title=title)
    return f"{trace} (for https://ui.perfetto.dev), timeline.png, timeline.svg"


def _summary(timeline: Timeline) -> str:
    return f"{1e3 * timeline.makespan:9.1f} ms per step, ranks idle {timeline.idle:.1%} of it"


def _line_of(rank: int, timeline: Timeline) -> str:
    """A line on when a rank ends its backward and takes its step."""
    spans = timeline.spans[rank]
    backward = max(index for index, span in enumerate(spans) if span.op.kind in ("B", "W"))
    step = [span for span in spans[backward + 1 :] if not span.op.group and span.op.kind not in _BEHIND_BACKWARD]
    line = f"rank {rank}: last backward ends at {1e3 * spans[backward].end:.1f} ms, its optimizer "
    if not step:
        return line + "has nothing to do: no weights of its own to train, or a step that was skipped"
    return line + f"works from {1e3 * step[0].start:.1f} to {1e3 * max(span.end for span in step):.1f} ms"
