"""The parts of ``make gpu``: each looks at one promise on the device and returns rows for the table."""

from __future__ import annotations

import contextlib
import operator
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from benchmarks.gpu import steps as stepped
from benchmarks.gpu.steps import backward_on_stream, one_rank_of, one_rank_of_mode, train_two_ranks
from lightning_muon import Components, FlexDeMoConfig, ParallelMuon
from lightning_muon.flexdemo.bucket import merge
from lightning_muon.math import newton_schulz as ns
from lightning_muon.math.dct import add_sparse_inverse_dct_
from lightning_muon.math.newton_schulz import NewtonSchulzGraphs
from lightning_muon.params.shapes import read_shapes
from lightning_muon.schedule.program import OpKind

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Row(NamedTuple):
    """What was looked at, what came out, and whether a promise held (``None``: nothing was promised)."""

    what: str
    figure: str
    held: bool | None = None


@dataclass(frozen=True)
class Device:
    """Where a part runs."""

    name: str
    is_small: bool

    @property
    def is_cuda(self) -> bool:
        return self.name == "cuda"

    def forget_memory(self) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @property
    def peak(self) -> str:
        """The most memory that was held since."""
        return f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if self.is_cuda else ""

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], Any], *, rounds: int = 7) -> float:
        times: list[float] = []
        for round_ in range(rounds + 2):
            self.synchronize()
            start = time.perf_counter()
            function()
            self.synchronize()
            if round_ >= 2:
                times.append(time.perf_counter() - start)
        return statistics.median(times)


def run_part(name: str, *, device: str, is_small: bool) -> dict[str, Any]:
    """Rows of one part as JSON; an exception becomes an error beside the rows before it."""
    outcome: dict[str, Any] = {"card": torch.cuda.get_device_name() if device == "cuda" else "cpu", "rows": []}
    # What the package and torch print must not get between the lines of the result.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            run, _ = PARTS[name]
            outcome["rows"] += (row._asdict() for row in run(Device(device, is_small)))
        except Exception as error:
            outcome["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            outcome["log"] = traceback.format_exc(limit=-6)
    return outcome


def environment(device: Device) -> Iterator[Row]:
    """Versions, and the two rates that all other times are compared with."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device.is_cuda else "none"
    yield Row("torch, CUDA, NCCL", f"{torch.__version__}, {torch.version.cuda}, {nccl}")
    yield Row("bf16 product of two large matrices", f"{_gemm_rate(device):.3g} TFLOP/s")
    source = torch.empty((1 << 20) if device.is_small else (1 << 31), dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    seconds = device.seconds(lambda: target.copy_(source))
    yield Row("copy, bytes read and written", f"{2 * source.numel() / seconds / 1e12:.3g} TB/s")


def _gemm_rate(device: Device) -> float:
    size = 512 if device.is_small else 8192
    a, b = (torch.randn(size, size, device=device.name, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / device.seconds(lambda: a @ b) / 1e12


def newton_schulz(device: Device) -> Iterator[Row]:
    """As it runs and kernel by kernel, beside a plain product and torch.optim.Muon; bits and singular values."""
    shapes = [(64, 96), (96, 64)]
    if not device.is_small:
        shapes = [(512, 2048), (1024, 4096), (2048, 7168), (4096, 4096), (14336, 4096), (8192, 28672)]
    gemm, way = _gemm_rate(device), ns.NewtonSchulz((_COEFFICIENTS,) * 5, torch.bfloat16)
    for rows, cols in shapes:
        x = torch.randn(rows, cols, device=device.name, dtype=torch.bfloat16)
        update = partial(way.orthogonalize, x, eps=1e-7)
        as_run = _as_it_runs(device, x[None])
        seconds, apart = device.seconds(as_run), device.seconds(update)
        of_torch = device.seconds(partial(_zeropower_via_newtonschulz, x, _COEFFICIENTS, 5, 1e-7))
        rate = way.flops(rows, cols) / seconds / 1e12
        yield Row(
            f"{rows} x {cols}",
            f"{1e3 * seconds:.3g} ms, {rate:.3g} TFLOP/s ({100 * rate / gemm:.0f} % of products), "
            f"{seconds / apart:.2f} of kernel by kernel, {seconds / of_torch:.2f} of torch.optim.Muon's",
        )
        first = update()
        again = all(torch.equal(first, each) for _ in range(3) for each in (update(), as_run()[0]))
        yield Row(f"{rows} x {cols}, same bits in seven runs", str(again), again)
        if rows <= 512:
            values = torch.linalg.svdvals(first.float())
            held = bool(((values > 0.3) & (values < 1.3)).all())
            yield Row("singular values", f"{values.min().item():.2f} to {values.max().item():.2f}", held)


def _as_it_runs(device: Device, matrices: Tensor) -> Callable[[], Tensor]:
    """What orthogonalizes a batch (number, rows, cols): one launch or many, as in a step."""
    way = ns.NewtonSchulz((_COEFFICIENTS,) * 5, torch.bfloat16)
    graph = None
    if device.is_cuda:
        num, rows, cols = matrices.shape
        graph = NewtonSchulzGraphs(matrices.dtype, matrices.device).take((num, rows, cols), way, eps=1e-7)
    if graph is None:
        return partial(way.orthogonalize, matrices, eps=1e-7)
    graph[0].copy_(matrices)
    return lambda: graph[1]()  # Which keeps what is read.


def merging(device: Device) -> Iterator[Row]:
    """FlexDeMo: all nodes decode the same messages to the same bits, however many components collide."""
    for num_nodes in (3, 5, 8):
        generator = torch.Generator(device.name).manual_seed(0)
        blocks = 64 if device.is_small else 16384
        random: Any = {"generator": generator, "device": device.name}
        sent = [
            Components(torch.randn(blocks, 32, **random), torch.rand(blocks, 256, **random).argsort(1)[:, :32])
            for _ in range(num_nodes)
        ]
        first, *others = [torch.zeros(blocks, 64, 64, device=device.name) for _ in range(21)]
        for each in (first, *others):
            merged = merge(sent, "mean", 64 * 64)
            assert merged.indices is not None
            add_sparse_inverse_dct_(each, merged.values, merged.indices)
        again = all(torch.equal(first, other) for other in others)
        yield Row(f"{num_nodes} nodes, same bits in 21 runs", str(again), again)


def adamw(device: Device) -> Iterator[Row]:
    """What is no matrix, against torch.optim.AdamW."""
    random = partial(torch.randn, generator=torch.Generator(device.name).manual_seed(0), device=device.name)
    ours = [torch.nn.Parameter(random(shape)) for shape in ((1000, 7), (65,), (1,), ())]
    theirs = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    options: Any = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    muon = ParallelMuon([{"params": ours, "algorithm": "adamw"}], **options)
    reference = torch.optim.AdamW(theirs, eps=muon.param_groups[0]["adamw_eps"], foreach=False, **options)
    for _ in range(5):
        for mine, its in zip(ours, theirs, strict=True):
            mine.grad = its.grad = random(mine.shape)
        muon.step()
        reference.step()
    difference = max((mine - its).abs().max().item() for mine, its in zip(ours, theirs, strict=True))
    counted = all(muon.state[each]["step"] == 5 for each in ours)
    yield Row("difference to torch.optim.AdamW after 5 steps", f"{difference:.1e}", counted and difference < 1e-6)


def waiting(device: Device) -> Iterator[Row]:
    """How often the host waits for the device in a step, beside the one event."""
    nodes = {"mesh_shape": (2, 4), "name": "fsdp"}
    modes: dict[str, dict[str, Any]] = {
        "fsdp": {"name": "fsdp"},
        "zero2": {"name": "zero2"},
        "ddp": {"name": "ddp"},
        "FlexDeMo": nodes | {"nodes": FlexDeMoConfig(check_every=0)},
        "FlexDeMo, signs": nodes | {"nodes": FlexDeMoConfig(base="sgd", check_every=0)},
    }
    for label, settings in modes.items():
        with one_rank_of_mode(device=device.name, **settings) as rank:
            rank.take_steps(3)
            rank.backward()
            yield _waits(label, device, rank.step)
    with one_rank_of(8, "t5-small", device=device.name, replicas=2) as optimizer:
        for _ in range(3):
            backward_on_stream(optimizer, device.name)
            optimizer.step()
        backward_on_stream(optimizer, device.name)
        yield _waits("2 replicas", device, optimizer.step)


def _waits(label: str, device: Device, step: Callable[[], Any]) -> Row:
    what = f"hidden synchronizations, {label}"
    if not device.is_cuda:  # It never warns.
        step()
        return Row(what, "none")
    spies: dict[str, mock.MagicMock] = {}
    with ExitStack() as stack, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for name in ("synchronize", "Event.synchronize", "Stream.synchronize"):
            function = operator.attrgetter(name)(torch.cuda)
            patch = mock.patch(f"torch.cuda.{name}", autospec=True, side_effect=function)
            spies[name] = stack.enter_context(patch)
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    found = [each for each in seen if "called a synchronizing" in str(each.message)]
    places = [f"{each.filename.rsplit('lightning_muon/', 1)[-1]}:{each.lineno}" for each in found]
    # In one event the host learns whether all gradients are finite.
    places += [name for name, spy in spies.items() if spy.call_count > (name == "Event.synchronize")]
    return Row(what, ", ".join(places) or "none", not places)


def two_ranks(device: Device) -> Iterator[Row]:
    """Two processes on one device over gloo: equal bits with and without overlap, and the weights of one process."""
    for sharding in ("fsdp", "ddp"):  # ZeRO-2 sends messages, which gloo cannot from a card.
        is_same, difference = train_two_ranks(sharding, device.name)
        if sharding == "fsdp":  # With ddp each rank repeats matrices that are so small.
            yield Row("bits of overlap='step' against 'off'", str(is_same), is_same)
        yield Row(f"{sharding}, difference to one process", f"{difference:.1e}", difference < 1e-5)


def steps(device: Device) -> Iterator[Row]:
    """Optimizer steps of named models as rank 0 of 8: time, launches, memory."""
    for shapes in ["t5-small"] if device.is_small else ["llama3.2-1b", "llama3-8b"]:
        device.forget_memory()
        with one_rank_of(8, shapes, device=device.name) as optimizer:
            held = sum(each.to_local().numel() for group in optimizer.param_groups for each in group["params"])
            times: list[tuple[float, float]] = []
            for _ in range(7):
                backward_on_stream(optimizer, device.name)
                device.synchronize()
                start = time.perf_counter()
                optimizer.step()
                middle = time.perf_counter()
                device.synchronize()
                times.append((time.perf_counter() - start, middle - start))
                optimizer.zero_grad()
            total, host = (1e3 * statistics.median(each) for each in zip(*times[2:], strict=True))
            assert optimizer._planned is not None
            flops = sum(op.cost for op in optimizer._planned.plan.ops if op.kind == OpKind.NEWTON_SCHULZ)
            launches = _launches(device, optimizer)
        figure = f"{total:.1f} ms, host {host:.1f} ms, {launches} launches, {held / 1e9:.2f} billion parameters here"
        share = 100 * flops / (total / 1e3) / 1e12 / _gemm_rate(device)
        yield Row(f"{shapes} on 8 ranks", f"{figure}{device.peak}, {share:.0f} % of the rate of products")
    yield _one_card("t5-small" if device.is_small else "llama3.2-1b", device)


def _one_card(shapes: str, device: Device) -> Row:
    """Steps of the matrices of a model in one process, with ParallelMuon and with torch.optim.Muon."""
    given = [each.shape for each in read_shapes(shapes).parameters if each.kind == "matrix"][
        :: 24 if device.is_small else 1
    ]
    weights = [torch.nn.Parameter(torch.randn(shape, device=device.name)) for shape in given]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    ours = ParallelMuon([{"params": weights, "algorithm": "muon"}], lr=1e-4)
    times = [device.seconds(each.step, rounds=3) for each in (ours, torch.optim.Muon(weights, lr=1e-4))]
    figure = f"{1e3 * times[0]:.1f} and {1e3 * times[1]:.1f} ms, {times[0] / times[1]:.2f} of the time"
    return Row(f"all {len(weights)} matrices of {shapes} on one card, ParallelMuon and torch.optim.Muon", figure)


def _launches(device: Device, optimizer: ParallelMuon) -> str:
    if not device.is_cuda:
        return "no"
    backward_on_stream(optimizer, device.name)
    device.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        optimizer.step()
        device.synchronize()
    # Calls of the host; a graph is one.
    calls = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
    return str(sum(event.count for event in profiler.key_averages() if event.key.startswith(calls)))


def training(device: Device) -> Iterator[Row]:
    """Steps of a training of 1.2 billion weights as rank 0 of 8, with each optimizer by turns."""
    whole, alone = ({name: list[float]() for name in stepped.OPTIMIZERS} for _ in range(2))
    tokens = f"{stepped.SEQUENCES} x {stepped.LENGTH} tokens on each of {stepped.RANKS} ranks"
    for name in [*stepped.OPTIMIZERS] * 2:
        device.forget_memory()
        with stepped.training_with(name, device=device.name, is_small=device.is_small) as each:
            # Three steps that no host waits between.
            whole[name].append(1e3 * device.seconds(partial(each.take_steps, 3), rounds=4) / 3)
            alone[name] += each.steps_on_device(9)[1:] if device.is_cuda else []
        del each
        yield Row(f"{name}, {tokens}", f"{whole[name][-1]:.1f} ms{device.peak}")
    fastest = {name: min(times) for name, times in whole.items()}
    yield Row("Muon over AdamW", f"{fastest['Muon'] / fastest['AdamW']:.3f} of the time")
    if device.is_cuda:
        its, ours, unchecked = (statistics.median(alone[name]) for name in stepped.OPTIMIZERS)
        figure = f"Muon {ours:.1f} ms, AdamW {its:.1f} ms: {1 + (ours - its) / fastest['AdamW']:.3f} of its time in all"
        yield Row("on the device, from the end of backward to the end of a step", figure)
        yield Row("the device waits for the host, which checks gradients", f"{ours - unchecked:.1f} ms")


def trainer(device: Device) -> Iterator[Row]:
    """A Trainer with one rank, on a card over NCCL: the weights of a loop of plain PyTorch, and a resume."""
    from benchmarks.gpu.trainer import compare_with_loop  # Lightning takes seconds to import.

    for sharding in ("fsdp", "zero2", "ddp"):
        with tempfile.TemporaryDirectory() as folder:
            found = compare_with_loop(sharding, device.name, Path(folder))
        if sharding == "fsdp":
            yield Row("backend", found["backend"], found["backend"] == ("nccl" if device.is_cuda else "gloo"))
        difference, resumes = found["difference"], found["resumes"]
        yield Row(f"{sharding}, difference to a plain loop", f"{difference:.1e}", difference < 1e-5)
        yield Row(f"{sharding}, same bits after a resume", str(resumes), resumes)


# What runs, and the seconds that it may take.
PARTS: dict[str, tuple[Callable[[Device], Iterator[Row]], float]] = {
    "environment": (environment, 60),
    "newton_schulz": (newton_schulz, 100),
    "merging": (merging, 40),
    "adamw": (adamw, 40),
    "waiting": (waiting, 60),
    "two_ranks": (two_ranks, 80),
    "trainer": (trainer, 90),
    "steps": (steps, 150),
    "training": (training, 120),
}
os.environ.setdefault("OMP_NUM_THREADS", "1")
