"""Measures every n-th step of an optimizer: time of its parts, sizes of updates, learning rates, bytes."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm import collectives
from lightning_muon.comm.agreement import gather, require_equal, together
from lightning_muon.comm.collectives import AxisGroup
from lightning_muon.config import check_whole, takes_options
from lightning_muon.optim.matrix_step import MatrixStep, lr_scale_of
from lightning_muon.optim.parallel_muon import PlannedOptimizer
from lightning_muon.params.layout import Layout, Matrix, parameters_of
from lightning_muon.schedule.program import Op
from lightning_muon.schedule.simulate import Span, Timeline

WHOLE_STEP = Op(kind="optimizer", key="all", rank=0)
_LATEST_END_SECONDS = 30.0


@takes_options()
class StepMonitor:
    """Measures every n-th step of an optimizer, and returns the results as numbers by name; see docs/monitor.md.

    Construction is collective over all ranks, and so is each measured step, which has two small all-gathers more: every
    rank must construct it, with the same arguments. All methods are local. Other steps only call two hooks that
    count. A measured step keeps a copy of one parameter of each param group.

    Example::

        monitor = StepMonitor(optimizer, every_n_steps=50)
        for batch in loader:
            ...
            optimizer.step()
            fabric.log_dict(monitor.take())

    Args:
        optimizer: Any optimizer, as a framework has returned it; the parts of a step are those of ours.
        every_n_steps: Measure every so many steps.
        first_step: Number of steps that the training has taken before.
    """

    def __init__(self, optimizer: Any, *, every_n_steps: int = 50, first_step: int = 0) -> None:
        check_whole("every_n_steps", every_n_steps, at_least=1)
        self.optimizer = unwrapped(optimizer)
        self.every_n_steps, self.num_steps = every_n_steps, first_step
        groups = len(self.optimizer.param_groups)
        require_equal([("every_n_steps", str(every_n_steps)), ("param groups", str(groups))], None, "StepMonitor")
        self._measured: _Measured | None = None
        self._values: dict[str, float] = {}
        self._num_measured = 0
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(self._after_step),
        ]
        self._arm()

    def take(self) -> dict[str, float]:
        """Return the values of the last measured step, equal on all ranks; empty if they were taken already."""
        values, self._values = self._values, {}
        return values

    def close(self) -> None:
        """Stop measuring."""
        while self._hooks:
            self._hooks.pop().remove()
        self._disarm()

    # ---- around a step

    def _arm(self) -> None:
        """If the next step is to be measured, start recording: parts of it may run in the backward pass before it."""
        if (self.num_steps + 1) % self.every_n_steps:
            return
        planned = self.optimizer._planned if isinstance(self.optimizer, PlannedOptimizer) else None
        device = next((parameter.device for parameter in parameters_of(self.optimizer)), torch.device("cpu"))
        measured = self._measured = _Measured(planned, TimelineRecorder(device))
        collectives.observers.append(measured.sent)
        if planned is not None:
            planned.executor.recorder = measured.recorder
            matrices = [each for group in planned.plan.exchange_groups for each in group.matrices]
            matrices = [each for each in matrices if each.parameter.group["orthogonalize"] == "newton_schulz"]
            measured.sample = matrices[self._num_measured % len(matrices)] if matrices else None
            planned.observer = measured.orthogonalized

    def _disarm(self) -> None:
        measured, self._measured = self._measured, None
        if measured is not None:
            collectives.observers.remove(measured.sent)
            if measured.planned is not None:
                measured.planned.executor.recorder = measured.planned.observer = None

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        measured = self._measured
        if measured is None:
            return None
        measured.before = {name: values.clone() for name, values in self._watched()}
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
        measured = self._measured
        if measured is not None:
            measured.recorder.ended(WHOLE_STEP)
            self._disarm()
            rows = gather(together(partial(self._measurements, measured)), None)
            self._values = _summary(rows) | learning_rates(self.optimizer, measured.planned)
            if (skipped := getattr(self.optimizer, "skipped_steps", None)) is not None:
                self._values["skipped_steps"] = float(skipped)
            self._num_measured += 1
        self._arm()

    # ---- numbers

    @torch.no_grad()
    def _measurements(self, measured: _Measured) -> dict[str, float]:
        """Measurements of this rank. Local; on CUDA the host waits."""
        found = {f"optimizer_ms/{part}": 1e3 * time for part, time in part_seconds(measured.recorder.spans()).items()}
        found |= {f"bytes/{axis}": float(size) for axis, size in measured.bytes_by_axis(self._axis_names()).items()}
        if measured.error is not None:
            found["orthogonality_error"] = float(measured.error)
        for name, values in self._watched():
            after = values.float()
            found[f"updates/{name}"] = float((after - measured.before[name].float()).square().sum())
            found[f"weights/{name}"] = float(after.square().sum())
            found[f"count/{name}"] = after.numel()
        return found

    def _watched(self) -> Iterator[tuple[str, Tensor]]:
        """The local part of the first parameter of each group that Muon updates, and of the first other one."""
        planned = self.optimizer if isinstance(self.optimizer, PlannedOptimizer) else None
        routed = [] if planned is None else planned._routed_parameters()
        muon = {id(each.tensor) for each in routed if each.route.algorithm == "muon"}
        layout = Layout() if planned is None else planned._layout
        seen: set[str] = set()
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                name = f"group{number}{'.muon' if id(parameter) in muon else ''}"
                if parameter.requires_grad and name not in seen:
                    seen.add(name)
                    yield name, layout.local(parameter).detach()

    def _axis_names(self) -> dict[int, Sequence[str]]:
        """Number of axes of a mesh of parameters -> their names."""
        meshes: list[DeviceMesh | None] = []
        if isinstance(self.optimizer, PlannedOptimizer) and self.optimizer._planned is not None:
            meshes = [self.optimizer._mesh, *(each.mesh for each in self.optimizer._planned.plan.meshes)]
        unnamed = ("replicate", "shard")
        return {mesh.ndim: mesh.mesh_dim_names or unnamed[-mesh.ndim :] for mesh in meshes if mesh is not None}


class TimelineRecorder:
    """Records when each op of the calling rank starts and ends; set it as ``executor.recorder``.

    On CUDA the clock is that of the device, synchronized with the host's once when recording begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._changed = threading.Condition()
        self._starts: dict[Op, Any] = {}
        self._ends: dict[Op, Any] = {}
        if self._is_cuda:
            torch.cuda.synchronize()
            self._origin = (time.monotonic(), self._now())
            torch.cuda.synchronize()

    def started(self, op: Op) -> None:
        """Call it before the action, with the stream of the op current on CUDA."""
        self._starts[op] = self._now()

    def ended(self, op: Op) -> None:
        """Call it when the op has ended (CPU, maybe in a thread of the backend) or its end is queued (CUDA)."""
        now = self._now()
        with self._changed:
            self._ends[op] = now
            self._changed.notify_all()

    def spans(self) -> list[Span]:
        """The recorded spans, in order of issue, in seconds of the host's clock; waits until all ops have ended."""
        with self._changed:
            # A rank that waited for a communication continues a moment before the backend's thread reports its end.
            if not self._changed.wait_for(lambda: len(self._ends) == len(self._starts), _LATEST_END_SECONDS):
                missing = [op.name for op in self._starts if op not in self._ends]
                raise RuntimeError(f"{missing[:4]} had not ended {_LATEST_END_SECONDS} s after the step")
            if self._is_cuda:
                torch.cuda.synchronize()
            return [Span(op, self._seconds(at), self._seconds(self._ends[op])) for op, at in self._starts.items()]

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Any) -> float:
        if not self._is_cuda:
            return moment
        seconds, event = self._origin
        return seconds + event.elapsed_time(moment) / 1e3


@dataclass(eq=False)
class _Measured:
    """The records of one measured step."""

    planned: MatrixStep | None
    recorder: TimelineRecorder
    sample: Matrix | None = None  # The matrix whose orthogonality is measured, on its owners.
    error: Tensor | None = None
    before: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    # Bytes by the coordinates of sender and receiver.
    bytes: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=Counter)

    def sent(self, group: AxisGroup, sizes: Mapping[int, int]) -> None:
        """Add the bytes of a communication that has begun."""
        for rank, size in sizes.items():
            self.bytes[group.coordinates[group.rank], group.coordinates[rank]] += size

    def orthogonalized(self, matrix: Matrix, update: Tensor) -> None:
        """Measure the orthogonality of an update if it is that of the sample."""
        if matrix is self.sample:
            self.error = orthogonality_error(update)

    def bytes_by_axis(self, names: Mapping[int, Sequence[str]]) -> Counter[str]:
        """Sent bytes by the outermost axis along which sender and receiver differ, which has the slowest link."""
        found = Counter[str]()
        for (mine, theirs), size in self.bytes.items():
            axis = next((axis for axis, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), -1)
            found[dict(enumerate(names.get(len(mine), ()))).get(axis, "other")] += size
        return found


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
    found = defaultdict[str, float](float)
    ops = [span for span in spans if span.op != WHOLE_STEP]
    for op, start, end in ops:
        found[op.kind] += end - start
    for _, begin, last in (span for span in spans if span.op == WHOLE_STEP):
        found["total"] = last - begin
        inside = [Span(op, max(begin, start), min(last, end)) for op, start, end in ops if end > begin and start < last]
        if inside:  # Only our optimizers have ops.
            summary = Timeline({0: inside}).ranks[0]
            found["exposed_communication"] = summary.exposed_seconds
            found["other"] = max(0.0, found["total"] - summary.compute_seconds - summary.exposed_seconds)
    return found


def learning_rates(optimizer: torch.optim.Optimizer, planned: MatrixStep | None) -> dict[str, float]:
    """``lr`` of each param group, and the factor on the update for each shape of its matrices. Local."""
    number_of = {id(group): number for number, group in enumerate(optimizer.param_groups)}
    found = {f"lr/group{number}": float(group["lr"]) for number, group in enumerate(optimizer.param_groups)}
    groups = () if planned is None else planned.plan.exchange_groups
    for matrix in (each for group in groups for each in group.matrices):
        group = matrix.parameter.group
        scale = lr_scale_of(matrix, group["adjust_lr_fn"])
        key = f"muon_lr/group{number_of[id(group)]}.{matrix.rows}x{matrix.cols}"
        found[key] = float(group["lr"]) * group["muon_lr_factor"] * scale
    return found


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of the wrappers of Fabric or Accelerate."""
    while not hasattr(optimizer, "register_step_pre_hook") or isinstance(
        getattr(optimizer, "optimizer", None), torch.optim.Optimizer
    ):
        optimizer = optimizer.optimizer
    return optimizer


def _summary(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The results of all ranks, by the names that loggers get; an axis or a part that took nothing is left out."""
    sums = {key: math.fsum(row.get(key, 0.0) for row in rows) for key in sorted({key for row in rows for key in row})}
    of_rank = "optimizer_ms/", "bytes/"
    found = {key: value / len(rows) for key, value in sums.items() if value and key.startswith(of_rank)}
    for name in (key.removeprefix("count/") for key, count in sums.items() if key.startswith("count/") and count):
        found[f"update_rms/{name}"] = math.sqrt(sums[f"updates/{name}"] / sums[f"count/{name}"])
        found[f"weight_rms/{name}"] = math.sqrt(sums[f"weights/{name}"] / sums[f"count/{name}"])
    errors = [row["orthogonality_error"] for row in rows if "orthogonality_error" in row]
    return found | ({"orthogonality_error": max(errors)} if errors else {})
