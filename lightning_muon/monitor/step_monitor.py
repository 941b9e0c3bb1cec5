"""Measures every n-th step of an optimizer: time of its parts, sizes of updates, bytes, throughput."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from lightning_muon.comm import collectives
from lightning_muon.comm.agreement import gather, require_equal, together
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.config import check_whole
from lightning_muon.monitor.timeline import WHOLE_STEP, TimelineRecorder, write_part
from lightning_muon.optim.matrix_step import lr_scale_of
from lightning_muon.optim.planned_optimizer import PlannedOptimizer, PlannedStep
from lightning_muon.optim.step_plan import MatrixJob
from lightning_muon.params.layout import Decoupled, Layout, parameters_of
from lightning_muon.params.uses import parameter_uses
from lightning_muon.schedule.program import OpKind
from lightning_muon.schedule.simulate import Span, Timeline

FOLDER = "muon_monitor"
"""Folder in the directory of a run, with the timeline of each rank, and ``steps.jsonl`` of rank 0."""
LINES = "steps.jsonl"
# Part of a step -> kinds of its ops.
PARTS = {
    "momentum": (OpKind.MOMENTUM, OpKind.EARLY_MOMENTUM),
    "gather": (OpKind.GATHER, OpKind.EARLY_GATHER),
    "newton_schulz": (OpKind.NEWTON_SCHULZ,),
    "scatter": (OpKind.SCATTER,),
    "update": (OpKind.UPDATE,),
    "adamw": (OpKind.ADAMW,),
    "weights": (OpKind.ALL_GATHER,),
    "nodes": (OpKind.EXCHANGE, OpKind.EARLY_EXCHANGE, OpKind.SETTLE, OpKind.DECODE),
    "check": (OpKind.CHECK,),
}
AXES = ("pipeline", "replicate", "shard", "context", "tensor", "other")
"""Names of mesh axes, the outermost first."""
# Names that Accelerate and Lightning use for the same axes.
_OTHER_NAMES = {
    "dp_replicate": "replicate",
    "dp_shard": "shard",
    "dp_shard_cp": "shard",
    "fsdp": "shard",
    "cp": "context",
    "tp": "tensor",
    "data_parallel": "shard",
    "tensor_parallel": "tensor",
}
MUON, REST = ".muon", ""  # Suffix of a param group's name for its parameters on Muon, and for its others.
MOST_ELEMENTS = 2**24  # Most elements of a rank's weights that are kept to measure updates: 64 MiB of float32.


class StepMonitor:
    """Measures every n-th step of an optimizer, and returns the results as numbers by name; see docs/monitor.md.

    Construction is collective over all ranks, and so is each measured step, which has one small all-gather more: every
    rank must construct it, with the same arguments. All methods are local. Other steps only call two hooks that
    count. Memory of a measured step: 4 bytes for each weight of the rank, 64 MiB at most.

    Example::

        monitor = StepMonitor(optimizer, model, every_n_steps=50)
        for batch in loader:
            ...
            monitor.count(batch.numel())
            optimizer.step()
            fabric.log_dict(monitor.take())

    Args:
        optimizer: Any optimizer, as a framework has returned it; the parts of a step are those of ours.
        module: The model, for its FLOPs: 6 for each weight that is multiplied, and token.
        every_n_steps: Measure every so many steps.
        flops_per_token: FLOPs of forward and backward, instead of those of ``module``: for experts, or long sequences.
        peak_flops: FLOP/s of one rank's device, for ``mfu``; 0 leaves that out.
        data_copies: Ranks that count the same tokens: those of a pipeline, of a context and tensor axis.
        skipped_steps: Returns the number of skipped steps, if the optimizer does not.
        first_step: Number of steps that the training has taken before.
        folder: Directory of the run, in which ``muon_monitor/`` gets the files for ``lightning-muon report``.
    """

    def __init__(
        self,
        optimizer: Any,
        module: nn.Module | None = None,
        *,
        every_n_steps: int = 50,
        flops_per_token: float = 0.0,
        peak_flops: float = 0.0,
        data_copies: int = 1,
        skipped_steps: Callable[[], int] | None = None,
        first_step: int = 0,
        folder: str | Path | None = None,
    ) -> None:
        check_whole("every_n_steps", every_n_steps, at_least=1)
        self.optimizer = unwrapped(optimizer)
        self.every_n_steps, self.peak_flops, self.data_copies = every_n_steps, peak_flops, data_copies
        self.flops_per_token = flops_per_token or (0.0 if module is None else flops_of_token(module))
        self.num_steps = first_step
        self._skipped = skipped_steps or (lambda: getattr(self.optimizer, "skipped_steps", 0))
        self._num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        groups = len(self.optimizer.param_groups)
        require_equal([("every_n_steps", str(every_n_steps)), ("param groups", str(groups))], None, "StepMonitor")
        self._folder = None if folder is None else Path(folder, FOLDER)
        self._seconds = 0.0  # Of the intervals that are measured, since the run began.
        together(self._begin_files)
        self._measured: _Measured | None = None
        self._values: dict[str, float] = {}
        self._num_measured, self._tokens = 0, 0.0
        self._since: float | None = None  # Begin of the current interval, moved on by pauses.
        self._steps_since = 0
        self._paused_at: float | None = None
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        self._arm()

    def count(self, tokens: float) -> None:
        """Add tokens of a batch of this rank."""
        self._tokens += tokens

    def take(self) -> dict[str, float]:
        """Return the values of the last measured step, equal on all ranks; empty if they were taken already."""
        values, self._values = self._values, {}
        return values

    def pause(self) -> None:
        """Exclude the time until :meth:`resume`, of a validation for example."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def resume(self) -> None:
        """Count time again."""
        if self._since is not None and self._paused_at is not None:
            self._since += time.monotonic() - self._paused_at
        self._paused_at = None

    def close(self) -> None:
        """Stop measuring."""
        while self._hooks:
            self._hooks.pop().remove()
        self._disarm()

    def _begin_files(self) -> None:
        """Keep the lines up to this step if a run is resumed; another run in the same folder starts with none."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._rank == 0:
            lines = self._folder / LINES
            old = lines.read_text(encoding="utf-8", errors="replace").split("\n") if lines.exists() else []
            kept = [each for each in old if _is_taken(each, self.num_steps)]
            draft = lines.with_suffix(".draft")
            draft.write_text("".join(f"{each}\n" for each in kept), "utf-8")
            draft.replace(lines)
            if kept:  # The clock of the run goes on.
                self._seconds = float(json.loads(kept[-1]).get("seconds", 0.0))

    @property
    def _device(self) -> torch.device:
        return next((parameter.device for parameter in parameters_of(self.optimizer)), torch.device("cpu"))

    # ---- around a step

    def _arm(self) -> None:
        """If the next step is to be measured, start recording: parts of it may run in the backward pass before it."""
        if (self.num_steps + 1) % self.every_n_steps:
            return
        planned = self.optimizer._planned if isinstance(self.optimizer, PlannedOptimizer) else None
        measured = self._measured = _Measured(planned, TimelineRecorder(self._device))
        collectives.observers.append(measured.sent)
        if planned is not None:
            planned.matrix_step.executor.recorder = measured.recorder
            jobs = [job for group in planned.plan.exchange_groups for job in group.jobs]
            jobs = [job for job in jobs if job.parameter.group["orthogonalize"] == "newton_schulz"]
            measured.sample = jobs[self._num_measured % len(jobs)] if jobs else None
            planned.matrix_step.observer = measured.orthogonalized

    def _disarm(self) -> None:
        measured, self._measured = self._measured, None
        if measured is not None:
            collectives.observers.remove(measured.sent)
            if measured.planned is not None:
                measured.planned.matrix_step.executor.recorder = measured.planned.matrix_step.observer = None

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        measured = self._measured
        if measured is None:
            return None
        measured.before = [part.values.clone() for part in self._parts()]
        started = partial(measured.recorder.started, WHOLE_STEP)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # The first one is the optimizer.
        if closure is None:
            started()
            return None

        def timed() -> Any:  # Lightning runs forward and backward in it.
            result = closure()
            started()
            return result

        return args[:1], kwargs | {"closure": timed}

    def _after_step(self, *_: Any) -> None:
        self.num_steps += 1
        self._steps_since += 1
        if self._since is None:  # The first step makes plans and compiles.
            self._since, self._steps_since, self._tokens = time.monotonic(), 0, 0.0
        measured = self._measured
        if measured is not None:
            measured.recorder.ended(WHOLE_STEP)
            self._disarm()
            self._finish(measured)
            self._num_measured += 1
        self._arm()

    # ---- numbers

    @torch.no_grad()
    def _finish(self, measured: _Measured) -> None:
        """Combine the measurements of all ranks. Collective over all ranks; every rank must call it."""
        own = dict.fromkeys(self._keys(), 0.0)
        spans: list[Span] = []
        error: Exception | None = None
        try:
            spans = measured.recorder.spans()
            own |= self._measurements(measured, spans)
        except Exception as problem:  # The other ranks must not wait for this one.
            error, own["failed"] = problem, 1.0
        rows = gather(own, None)
        if error is not None:
            raise error
        failed = [rank for rank, row in enumerate(rows) if row["failed"]]
        if failed:
            raise RuntimeError(f"StepMonitor: rank {failed[0]} has failed to measure step {self.num_steps}")
        self._values = self._summary(rows) | learning_rates(self.optimizer, measured.planned)
        self._seconds += _mean(rows, "elapsed")
        self._since, self._steps_since, self._tokens = time.monotonic(), 0, 0.0
        if self._folder is not None:
            try:
                self._write(self._folder, measured, spans, rows)
            except OSError as error:  # On this rank only: a full disk must not stop a training.
                warnings.warn(f"StepMonitor writes no more files: {error}", stacklevel=2)
                self._folder = None

    def _keys(self) -> list[str]:
        """Keys of the measurements, equal on all ranks."""
        names = ["failed", "elapsed", "steps", "tokens", "model_flops", "optimizer_flops", "orthogonality_error"]
        names += [f"ms/{part}" for part in (*PARTS, "total", "exposed_communication", "other")]
        names += [f"bytes/{axis}" for axis in AXES]
        kinds = MUON, REST
        groups = [f"group{number}{kind}" for number in range(len(self.optimizer.param_groups)) for kind in kinds]
        return names + [f"{what}/{group}" for group in groups for what in ("updates", "weights", "count")]

    def _measurements(self, measured: _Measured, spans: Sequence[Span]) -> dict[str, float]:
        """Measurements of this rank. Local; on CUDA the host waits."""
        assert self._since is not None
        tokens = self._tokens / self.data_copies
        found = {
            "elapsed": time.monotonic() - self._since,
            "steps": self._steps_since,
            "tokens": tokens,
            "model_flops": tokens * self.flops_per_token,
            "optimizer_flops": sum(span.op.cost for span in spans),
            "orthogonality_error": -1.0 if measured.error is None else float(measured.error),
            **{f"ms/{part}": 1e3 * seconds for part, seconds in part_seconds(spans).items()},
            **{f"bytes/{axis}": size for axis, size in measured.bytes_by_axis(self._axis_names()).items()},
        }
        sizes: dict[str, list[Tensor]] = {}
        for part, before in zip(self._parts(), measured.before, strict=True):
            after = part.values.float()
            squares = torch.stack([(after - before.float()).square().sum(), after.square().sum()])
            sizes.setdefault(part.name, []).append(part.weight * squares.double())
            found[f"count/{part.name}"] = found.get(f"count/{part.name}", 0.0) + part.weight * after.numel()
        for name, squares in sizes.items():
            found[f"updates/{name}"], found[f"weights/{name}"] = torch.stack(squares).sum(0).tolist()
        return found

    def _summary(self, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """The results, by the names that loggers get."""
        found: dict[str, float] = {}
        for key in rows[0]:
            kind, _, name = key.partition("/")
            if kind in ("ms", "bytes") and (mean := _mean(rows, key)):
                found[f"{'optimizer_ms' if kind == 'ms' else kind}/{name}"] = mean
            if kind == "count" and (count := _sum(rows, key)):
                found[f"update_rms/{name}"] = math.sqrt(_sum(rows, f"updates/{name}") / count)
                found[f"weight_rms/{name}"] = math.sqrt(_sum(rows, f"weights/{name}") / count)
        if (error := max(row["orthogonality_error"] for row in rows)) >= 0:
            found["orthogonality_error"] = error
        steps, seconds = rows[0]["steps"], _mean(rows, "elapsed")
        if steps and seconds > 0:
            tokens, per_rank = _sum(rows, "tokens"), seconds * self._num_ranks
            rates = {
                "model": _sum(rows, "model_flops") / per_rank,
                "optimizer": steps * _sum(rows, "optimizer_flops") / per_rank,
            }
            found |= {"tokens_per_second": tokens / seconds} if tokens else {}
            found |= {f"tflops/{what}": rate / 1e12 for what, rate in rates.items() if rate}
            found |= {f"mfu/{what}": rate / self.peak_flops for what, rate in rates.items() if rate and self.peak_flops}
        return found | {"skipped_steps": float(self._skipped())}

    def _parts(self) -> Iterator[_Part]:
        """Yield the elements, or evenly spaced ones, that this rank updates of each parameter that trains."""
        planned = self.optimizer if isinstance(self.optimizer, PlannedOptimizer) else None
        layout = Layout() if planned is None else planned._layout
        groups = [
            (number, parameter)
            for number, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        algorithms = (
            {} if planned is None else {id(each.tensor): each.route.algorithm for each in planned._routed_parameters()}
        )
        local = [layout.local(parameter).detach() for _, parameter in groups]
        stride = math.ceil(sum(each.numel() for each in local) / MOST_ELEMENTS)
        for (number, parameter), values in zip(groups, local, strict=True):
            if not values.numel():
                continue
            mesh, placements = layout.mesh_and_placements(parameter)
            copies = math.prod(
                mesh.size(axis)
                for axis, each in enumerate(placements)
                if mesh and isinstance(each, Replicate | Decoupled)
            )
            sample = values.reshape(-1)[::stride]
            name = f"group{number}{MUON if algorithms.get(id(parameter)) == 'muon' else REST}"
            yield _Part(name, sample, values.numel() / sample.numel() / copies)

    def _axis_names(self) -> dict[int, Sequence[str]]:
        """Number of axes of a mesh of parameters -> their names."""
        meshes: list[DeviceMesh | None] = []
        if isinstance(self.optimizer, PlannedOptimizer) and self.optimizer._planned is not None:
            meshes = [self.optimizer._mesh, *(each.mesh for each in self.optimizer._planned.plan.meshes)]
        unnamed = ("replicate", "shard")
        return {mesh.ndim: mesh.mesh_dim_names or unnamed[-mesh.ndim :] for mesh in meshes if mesh is not None}

    def _write(
        self, folder: Path, measured: _Measured, spans: Sequence[Span], rows: Sequence[Mapping[str, float]]
    ) -> None:
        recorded = [span for span in spans if span.op != WHOLE_STEP]
        write_part(folder, recorded, measured.planned, step=self.num_steps, rank=self._rank, num_ranks=self._num_ranks)
        if self._rank:
            return
        line = {
            "step": self.num_steps,
            "seconds": self._seconds,
            "values": self._values,
            "matrix": measured.sample and measured.sample.matrix.name,
            "newton_schulz_ms": [row["ms/newton_schulz"] for row in rows],
            "newton_schulz_gflop": [row["optimizer_flops"] / 1e9 for row in rows],
        }
        with (folder / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class _Part(NamedTuple):
    """A sample of this rank's elements of a parameter, for sums over all ranks."""

    name: str  # Param group, and whether Muon updates it.
    values: Tensor  # 1-D
    weight: float  # Number of elements of the model that each one stands for: less than 1 if ranks hold copies.


@dataclass(eq=False)
class _Measured:
    """The records of one measured step."""

    planned: PlannedStep | None
    recorder: TimelineRecorder
    sample: MatrixJob | None = None  # The matrix whose orthogonality is measured, on its owners.
    error: Tensor | None = None
    before: list[Tensor] = field(default_factory=list[Tensor])
    # Bytes by the coordinates of sender and receiver.
    bytes: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=Counter)

    def sent(self, group: AxisGroup, sizes: Mapping[int, int]) -> None:
        """Add the bytes of a communication that has begun."""
        for rank, size in sizes.items():
            self.bytes[group.coordinates[group.rank], group.coordinates[rank]] += size

    def orthogonalized(self, job: MatrixJob, update: Tensor) -> None:
        """Measure the orthogonality of an update if it is that of the sample."""
        if job is self.sample:
            self.error = orthogonality_error(update)

    def bytes_by_axis(self, names: Mapping[int, Sequence[str]]) -> Counter[str]:
        """Sent bytes by the outermost axis along which sender and receiver differ, which has the slowest link."""
        found = Counter[str]()
        for (mine, theirs), size in self.bytes.items():
            axis = next((axis for axis, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), -1)
            name = dict(enumerate(names.get(len(mine), ()))).get(axis, "other")
            name = _OTHER_NAMES.get(name, name)
            found[name if name in AXES else "other"] += size
        return found


def _is_taken(line: str, num_steps: int) -> bool:
    """Whether a line is of one of the first ``num_steps`` steps; a killed process may have left half a line."""
    with suppress(ValueError, LookupError, TypeError):
        return json.loads(line)["step"] <= num_steps
    return False


def orthogonality_error(update: Tensor) -> Tensor:
    """``|U U^T - I| / sqrt(s)`` of ``U`` (rows, cols), with the Gram matrix of the short side s; 0-d, float32.

    It is the root mean square of (sigma^2 - 1) over the singular values: 0 for an orthogonal matrix, 1 for zero.
    """
    wide = update.float() if update.size(0) <= update.size(1) else update.float().mT
    gram = wide @ wide.mT
    gram.diagonal().sub_(1)
    return torch.linalg.matrix_norm(gram) / math.sqrt(gram.size(0))


def part_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of each part of a step, from the spans of a rank, among which is the whole step."""
    found = {part: sum(end - start for op, start, end in spans if op.kind in kinds) for part, kinds in PARTS.items()}
    ops = [span for span in spans if span.op != WHOLE_STEP]
    for _, begin, last in (span for span in spans if span.op == WHOLE_STEP):
        found["total"] = last - begin
        inside = [Span(op, max(begin, start), min(last, end)) for op, start, end in ops if end > begin and start < last]
        if inside:  # Only our optimizers have ops.
            summary = Timeline({0: inside}).ranks[0]
            found["exposed_communication"] = summary.exposed_seconds
            found["other"] = max(0.0, found["total"] - summary.compute_seconds - summary.exposed_seconds)
    return found


def learning_rates(optimizer: torch.optim.Optimizer, planned: PlannedStep | None) -> dict[str, float]:
    """``lr`` of each param group, and the factor on the update for each shape of its matrices. Local."""
    number_of = {id(group): number for number, group in enumerate(optimizer.param_groups)}
    found = {f"lr/group{number}": float(group["lr"]) for number, group in enumerate(optimizer.param_groups)}
    jobs = [] if planned is None else [job for each in planned.plan.exchange_groups for job in each.jobs]
    for job in jobs:
        group, matrix = job.parameter.group, job.matrix
        scale = lr_scale_of(matrix, group["adjust_lr_fn"])
        key = f"muon_lr/group{number_of[id(group)]}.{matrix.rows}x{matrix.cols}"
        found[key] = float(group["lr"]) * group["muon_lr_factor"] * scale
    return found


def flops_of_token(module: nn.Module) -> float:
    """FLOPs of forward and backward for a token: 6 for each weight that is multiplied, 4 if it is frozen. Local.

    Attention between tokens is left out, and so are embeddings that are looked up only.

    Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.
    """
    used = (uses for uses in parameter_uses(module) if uses[0].parameter.ndim > 1)
    multiplied = [uses[0].parameter for uses in used if not all(isinstance(use.owner, nn.Embedding) for use in uses)]
    return float(sum(each.numel() * (6 if each.requires_grad else 4) for each in multiplied))


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of the wrappers of Fabric or Accelerate."""
    while not hasattr(optimizer, "register_step_pre_hook") or isinstance(
        getattr(optimizer, "optimizer", None), torch.optim.Optimizer
    ):
        optimizer = optimizer.optimizer
    return optimizer


def _mean(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return _sum(rows, key) / len(rows)


def _sum(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return math.fsum(row[key] for row in rows)
