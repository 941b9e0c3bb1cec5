"""Measures a cost model on this machine, while all ranks work at once, and compares measured and predicted steps."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, empty

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.collectives import start_all_to_all
from lightning_muon.comm.groups import AxisGroup, axis_group
from lightning_muon.compat.torch import let_gloo_finish_at_exit
from lightning_muon.config import MuonConfig
from lightning_muon.math.coefficients import JORDAN
from lightning_muon.math.newton_schulz import NewtonSchulz
from lightning_muon.monitor.timeline import Recording, predict, record_step
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.params.logical import logical_matrices
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.program import OpKind
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape
from lightning_muon.schedule.simulate import Span, Timeline

_TIMEOUT = timedelta(minutes=10)


def run_on_ranks(function: Callable[..., Any], *args: Any, num_ranks: int) -> Any:
    """Call ``function(*args)`` on ``num_ranks`` ranks of a default process group, and return what rank 0 returns.

    Inside a process group, or under a launcher that sets ``RANK`` and ``WORLD_SIZE`` (torchrun), every rank must call
    it with the same arguments; the group must have ``num_ranks`` ranks, and each rank gets its own result. Otherwise
    gloo processes are started on this machine, and share its cores; then everything must be picklable.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not dist.is_initialized() and not is_launched:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_run_spawned, args=(num_ranks, folder, function, args), nprocs=num_ranks)
            return pickle.loads(Path(folder, "result").read_bytes())
    size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if size != num_ranks:
        raise ValueError(f"there is a process group of {size} ranks, but {num_ranks} were asked for; ask for {size}")
    if dist.is_initialized():
        return function(*args)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=_TIMEOUT)
    try:
        return function(*args)
    finally:
        dist.destroy_process_group()


def this_device() -> torch.device:
    """CUDA device of this rank if the default process group uses NCCL, else the CPU."""
    if dist.get_backend() != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _run_spawned(rank: int, num_ranks: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    let_gloo_finish_at_exit()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=_TIMEOUT
    )
    result = function(*args)
    dist.barrier()
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def make_optimizer(model: ModelShapes, *, num_replicas: int = 1, **options: Any) -> ParallelMuon:
    """ParallelMuon on random weights of these shapes, sharded as by FSDP2. Collective; every rank must call it."""
    mesh = _mesh(num_replicas)
    # Replicas hold equal weights.
    torch.manual_seed(mesh.get_local_rank("shard"))
    trained = [parameter for parameter in model.parameters if not parameter.frozen]
    groups: list[dict[str, Any]] = []
    for algorithm in ("muon", "adamw"):
        chosen = [each for each in trained if (each.kind == "elementwise") == (algorithm == "adamw")]
        if chosen:
            groups.append({"params": [(each.name, _weight(each, mesh)) for each in chosen], "algorithm": algorithm})
    parts = [{each.name: each.splits for each in trained if each.splits and each.split_dim == dim} for dim in (0, 1)]
    return ParallelMuon(groups, fused=parts[0], fused_inputs=parts[1], **options)


def _mesh(num_replicas: int) -> DeviceMesh:
    """Collective over the default process group; every rank must call it."""
    shape = num_replicas, dist.get_world_size() // num_replicas
    return init_device_mesh(this_device().type, shape, mesh_dim_names=("replicate", "shard"))


def _weight(parameter: ParameterShape, mesh: DeviceMesh) -> nn.Parameter:
    placements = (Replicate(), Shard(parameter.shard_dim) if parameter.shape else Replicate())
    weight, gradient = (empty(parameter.shape, device_mesh=mesh, placements=placements) for _ in range(2))
    for tensor in (weight, gradient):
        tensor.to_local().normal_()
    weight = nn.Parameter(weight)
    weight.grad = gradient
    return weight


# Larger sides are cut to this: smaller products already reach the full rate, and the measurement stays short.
_LARGEST_SIDE = {"cpu": 1024, "cuda": 8192}
_MOST_SHAPES, _MOST_PER_RANK = 4, 32
_MOST_FLOPS_PER_RANK = {"cpu": 40e9, "cuda": 40e12}
# Two sizes of buckets, to separate the constant cost of an op from the cost of its bytes.
_CHUNK_BYTES = (MuonConfig.chunk_bytes, MuonConfig.chunk_bytes // 8)
_NUM_STEPS = 5
_LARGEST_CORRECTION, _NUM_HALVINGS = 4.0, 30
_MESSAGE_BYTES, _NUM_MESSAGES = (2**16, 2**22), 15
_NEWTON_SCHULZ = NewtonSchulz((JORDAN,) * 5, torch.float32)
# Options of an optimizer that change the cost of its Newton-Schulz and the bytes that are sent.
ARITHMETIC = ("ns_coefficients", "ns_steps", "ns_quality", "compute_dtype", "wire_dtype")
duration = attrgetter("timeline.makespan")  # Duration of a recording, in seconds.


def calibrate(model: ModelShapes, *, num_ranks: int, num_replicas: int = 1, **options: Any) -> CostModel:
    """Measure Newton-Schulz, memory and links in less than 20 seconds, while all ranks work at once.

    Fits the rates to ops and whole steps of :class:`~lightning_muon.ParallelMuon` on a sample of the matrices, so that
    packing and contention for cores count, and times all-to-alls along each axis of the mesh. ``options`` are those of
    the optimizer in ``ARITHMETIC``. Collective, or on processes that it starts: see :func:`run_on_ranks`.
    """
    counts = Counter(
        (matrix.rows, matrix.cols)
        for parameter in model.parameters
        if parameter.kind != "elementwise" and not parameter.frozen
        for matrix in logical_matrices(parameter.shape, parameter)
    )
    if not counts:
        raise ValueError(f"{model.name} has no matrices that are trained, so there is nothing to measure")
    return run_on_ranks(_measure, counts, num_replicas, options, num_ranks=num_ranks)


def sample_matrices(counts: Mapping[tuple[int, int], int], num_ranks: int, device_type: str = "cpu") -> ModelShapes:
    """A few matrices per rank with about the mix of ``counts`` (shape -> number), the largest cut to size."""
    side = _LARGEST_SIDE[device_type]
    cut: Counter[tuple[int, int]] = Counter()
    for (rows, cols), count in counts.items():
        cut[min(rows, side), min(cols, side)] += count
    work = {shape: count * _NEWTON_SCHULZ.flops(*shape) for shape, count in cut.items()}
    chosen = sorted(work, key=lambda shape: (-work[shape], shape))[:_MOST_SHAPES]
    total = sum(cut[shape] for shape in chosen)
    mean_flops = sum(work[shape] for shape in chosen) / total
    per_rank = min(_MOST_PER_RANK, max(1, int(_MOST_FLOPS_PER_RANK[device_type] / mean_flops)))
    parameters = [
        ParameterShape(name=f"{shape[0]}x{shape[1]}.{number}", shape=shape, kind="matrix")
        for shape in chosen
        for number in range(num_ranks * max(1, round(per_rank * cut[shape] / total)))
    ]
    return ModelShapes(name="sample", source="", parameters=tuple(parameters))


def fit_compute(spans: Sequence[Span]) -> dict[str, float]:
    """Fit the memory rate by least squares to elementwise ops, and the FLOP/s to the remaining Newton-Schulz time."""
    elementwise = [
        (span.op.bytes, span.end - span.start) for span in spans if span.op.kind in (OpKind.MOMENTUM, OpKind.UPDATE)
    ]
    per_byte, op_seconds = fit_line(elementwise)
    products = [span for span in spans if span.op.kind == OpKind.NEWTON_SCHULZ and span.op.cost]
    seconds = sum(span.end - span.start - op_seconds - per_byte * span.op.bytes for span in products)
    flops = sum(span.op.cost for span in products)
    return {
        "flops_per_second": flops / max(seconds, 1e-9),
        "memory_bytes_per_second": 1 / per_byte,
        "op_seconds": op_seconds,
    }


def fit_steps(cost: CostModel, recordings: Sequence[Recording], *, device_type: str) -> CostModel:
    """Correct ``flops_per_second`` so that predicted steps take as long as measured ones, in geometric mean."""
    # A fit to single ops gives too short steps: ranks share cores, and wait for the last one at each communication.
    begun = [min(spans[0].start for spans in each.timeline.spans.values() if spans) for each in recordings]
    measured = [each.timeline.makespan - start for each, start in zip(recordings, begun, strict=True)]

    def surplus(factor: float) -> float:
        changed = replace(cost, flops_per_second=factor * cost.flops_per_second)
        predicted = [predict(recording, changed, device_type=device_type).makespan for recording in recordings]
        return sum(math.log(each / seconds) for each, seconds in zip(predicted, measured, strict=True))

    low, high = -math.log(_LARGEST_CORRECTION), math.log(_LARGEST_CORRECTION)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if surplus(math.exp(middle)) > 0 else (low, middle)
    return replace(cost, flops_per_second=math.exp((low + high) / 2) * cost.flops_per_second)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit ``y = slope x + constant`` by least squares, with slope > 0 and constant >= 0; return both."""
    xs, ys = zip(*points, strict=True)
    if len(set(xs)) > 1:
        slope, constant = linear_regression(xs, ys)
        if slope > 0 and constant >= 0:
            return slope, constant
    # Too noisy, or all of one size: attribute all of the time to the size.
    return fmean(ys) / fmean(xs), 0.0


def _measure(counts: Mapping[tuple[int, int], int], num_replicas: int, options: dict[str, Any]) -> CostModel:
    """Collective over the default process group; every rank must call it."""
    device_type = this_device().type
    model = sample_matrices(counts, dist.get_world_size(), device_type)
    large, small = ({**options, "chunk_bytes": chunk_bytes} for chunk_bytes in _CHUNK_BYTES)
    serial, pipelined = (_fastest_step(model, num_replicas, {**large, "overlap": kind}) for kind in ("off", "step"))
    pieces = _fastest_step(model, num_replicas, {**small, "overlap": "off"})
    spans = [span for step in (serial, pieces) for each in step.timeline.spans.values() for span in each]
    latencies, bandwidths = [], []
    mesh = _mesh(num_replicas)
    groups = [axis_group(mesh, (axis,)) for axis in (1, 0) if mesh.size(axis) > 1]
    # Without links, a link that costs nothing.
    links = [[_time_message(group, size) for size in _MESSAGE_BYTES] for group in groups] or [[(1.0, 1e-12)]]
    for points in links:
        per_byte, latency = map(fmean, zip(*gather(fit_line(points), None), strict=True))  # The same on all ranks.
        latencies.append(latency)
        bandwidths.append(1 / per_byte)
    fitted = CostModel.from_dict({**fit_compute(spans), "bandwidth": bandwidths, "latency_seconds": latencies})
    return fit_steps(fitted, (serial, pipelined), device_type=device_type)


def _fastest_step(model: ModelShapes, num_replicas: int, options: Mapping[str, Any]) -> Recording:
    """Record the fastest of a few steps: other work on the machine only adds. Collective; every rank must call it."""
    options = {**options, "dedupe": "never", "error_if_nonfinite": False}
    return min(record_steps(model, num_replicas, _NUM_STEPS, options), key=duration)


def record_steps(model: ModelShapes, num_replicas: int, num_steps: int, options: Mapping[str, Any]) -> list[Recording]:
    """Record so many steps after a first one. Collective; every rank must call it."""
    optimizer = make_optimizer(model, num_replicas=num_replicas, **options)
    optimizer.step()
    return [record_step(optimizer) for _ in range(num_steps)]


def _time_message(group: AxisGroup, size: int) -> tuple[float, float]:
    """Time an all-to-all: (bytes sent by a rank, seconds). Collective over ``group``; every rank must call it."""
    device = this_device()
    counts = [0 if peer == group.rank else size // (group.size - 1) for peer in range(group.size)]
    out, into = (torch.empty(sum(counts), dtype=torch.uint8, device=device) for _ in range(2))
    seconds: list[float] = []
    for _ in range(_NUM_MESSAGES):
        dist.barrier(group.group)
        started = time.monotonic()
        for work in start_all_to_all(out, counts, into, counts, group):
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    # The first ones open connections.
    return float(sum(counts)), median(seconds[_NUM_MESSAGES // 3 :])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One measured step and its prediction."""

    recording: Recording  # The fastest of the recorded steps: other work on the machine only adds.
    cost: CostModel  # The model that was measured just before.
    predicted: Timeline  # The same ops in the same order, simulated.
    measured_seconds: tuple[float, ...]  # Duration of each recorded step.


def compare(
    model: ModelShapes, *, num_replicas: int, num_steps: int, options: Sequence[Mapping[str, Any]]
) -> list[Comparison]:
    """Calibrate, record steps with each set of options, and predict the same. Collective; every rank must call it.

    All sets have the same options in ``ARITHMETIC``.
    """
    arithmetic = {key: value for key, value in options[0].items() if key in ARITHMETIC}
    cost = calibrate(model, num_ranks=dist.get_world_size(), num_replicas=num_replicas, **arithmetic)
    comparisons: list[Comparison] = []
    for each in options:
        recordings = record_steps(model, num_replicas, num_steps, each)
        fastest = min(recordings, key=duration)
        predicted = predict(fastest, cost, device_type=this_device().type)
        seconds = tuple(map(duration, recordings))
        comparisons.append(Comparison(recording=fastest, cost=cost, predicted=predicted, measured_seconds=seconds))
    return comparisons
