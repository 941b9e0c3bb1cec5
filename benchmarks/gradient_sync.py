"""Time, traffic and memory of whole training steps, for every way to divide gradients; ratios in one run.

    python benchmarks/gradient_sync.py --ranks 2 4 --exposed

Starts gloo processes on this machine (one thread each), or runs under torchrun, and takes turns between

- ``zero2``, ``fsdp`` and ``ddp`` of this package with ParallelMuon, and with AdamW alone (in ``zero2`` that is
  ParallelMuon with ``algorithm="adamw"`` for all but a frozen matrix of 16 x 16, since it must have one),
- torch's DistributedDataParallel with torch.optim.Muon for matrices and AdamW for the rest, with
  ZeroRedundancyOptimizer (which takes one class: AdamW), and with AdamW,
- what Lightning's ModelParallelStrategy does, without its Trainer: ``fully_shard`` for each block and for the model,
  and AdamW.

A turn is ``--steps`` training steps of equal batches and ends when all parameters have arrived, so that nothing that
``zero2`` leaves for the next forward is missed; the table has the median over the turns of the slowest rank.

- *sent*: bytes that leave a rank in one step, mean over the ranks, from the calls of torch.distributed. Exact for
  messages and all-to-all; for N bytes on S ranks an all-reduce counts 2 (S-1)/S N, a reduce-scatter of N and an
  all-gather to N (S-1)/S N each, a broadcast (S-1) N at its root: the least that they need, as rings reach it.
- *held*: tensors after backward and before the step: parameters, gradients, optimizer state; mean over the ranks.
- *peak*: the most that the allocator has given out at any time of a step, activations included; the largest rank.
- *exposed* (``--exposed``): the step minus the same step with calls that carry floating-point numbers replaced by
  ones that move nothing. Both under the same observer, which makes either a little slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gradient_contenders import CONTENDERS, DDP, MIB, ZERO, Contender, num_bytes
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_muon.cli.doctor import run_on_ranks, this_device


class Wire(TorchDispatchMode):
    """Counts the bytes that leave this rank inside of it.

    Args:
        muted: Whether what carries floating-point numbers is left out; zeros are received in its place.
    """

    def __init__(self, *, muted: bool = False) -> None:
        super().__init__()
        self.num_bytes, self.calls, self._muted = 0.0, list[tuple[str, float, dist.Work]](), muted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or func.overloadpacket.__name__ == "barrier":
            return func(*args, **(kwargs or {}))
        name, began = func.overloadpacket.__name__, time.monotonic()
        self.num_bytes += bytes_out(name, args)
        tensors = [tensor for each in args[:2] for tensor in (each if isinstance(each, list) else [each])]
        if not self._muted or not any(isinstance(each, Tensor) and each.is_floating_point() for each in tensors):
            result = func(*args, **(kwargs or {}))
            self.calls.append((name, began, dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)))
            return result
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(args[0])
        work = _create_work_from_future(future).boxed()
        if name in ("alltoall_base_", "_allgather_base_", "_reduce_scatter_base_"):
            args[0].zero_()
        return work if name in ("alltoall_base_", "send", "recv_") else (args[0], work)


def bytes_out(name: str, args: Any) -> float:
    """What leaves this rank; see the top of this file."""
    group = next(dist.ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject))
    ranks, source = group.size(), args[1] if name in ("_allgather_base_", "_reduce_scatter_base_") else args[0]
    if name == "alltoall_base_":
        counts = args[4]
        return (sum(counts) - counts[group.rank()]) * args[1].element_size()
    size = num_bytes(source if isinstance(source, list) else [source])
    if name == "broadcast_":
        return (ranks - 1) * size * (args[2] == group.rank())
    factors = {"allreduce_": 2 * (ranks - 1) / ranks, "_reduce_scatter_base_": (ranks - 1) / ranks, "send": 1}
    return factors.get(name, ranks - 1 if name == "_allgather_base_" else 0) * size


def worker(num_ranks: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all contenders; every rank must call it, and gets all rows."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (arguments.accumulate, arguments.batch, arguments.length)
    batches = list(torch.randint(arguments.words, shape, generator=generator).to(this_device()))
    chosen = [name for name in CONTENDERS if any(word in name for word in arguments.only)]
    contenders: dict[str, Contender] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in chosen:
        contenders[name], rows[name] = measure_memory(CONTENDERS[name], batches, arguments)
    check_losses(rows)
    modes = ["plain", "observed", "muted"] if arguments.exposed else ["plain"]
    seconds: dict[tuple[str, str], list[float]] = {(name, mode): [] for name in chosen for mode in modes}
    for _ in range(arguments.rounds):
        for name, mode in seconds:
            wire = {"plain": nullcontext(), "observed": Wire(), "muted": Wire(muted=True)}[mode]
            seconds[name, mode].append(time_steps(contenders[name], batches, arguments.steps, wire))
    for (name, mode), values in seconds.items():
        rows[name][mode] = statistics.median(values)
    if arguments.timeline and "zero2 + ParallelMuon" in contenders:
        record_timeline(contenders["zero2 + ParallelMuon"], batches, f"{arguments.timeline}")
    return [{"ranks": num_ranks, "name": name} | row for name, row in rows.items()]


def time_steps(contender: Contender, batches: Sequence[Tensor], steps: int, wire: AbstractContextManager[Any]) -> float:
    """Seconds per step of the slowest rank."""
    synchronize()
    dist.barrier()
    started = time.perf_counter()
    with wire:
        for _ in range(steps):
            contender.backward(batches)
            contender.step()
        contender.wait()
    synchronize()
    dist.barrier()
    return (time.perf_counter() - started) / steps


def synchronize() -> None:
    if this_device().type == "cuda":
        torch.cuda.synchronize()


def measure_memory(
    make: Callable[[argparse.Namespace], Contender], batches: Sequence[Tensor], arguments: argparse.Namespace
) -> tuple[Contender, dict[str, Any]]:
    """Make a contender and take three steps; bytes that are sent in the third one and held in it."""
    base = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        contender = make(arguments)
        for _ in range(2):
            contender.backward(batches)
            contender.step()
        contender.wait()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with torch.profiler.record_function("third step"), Wire() as wire:
            loss = contender.backward(batches)
            held = contender.held()
            contender.step()
            contender.wait()
    dist.all_reduce(loss)
    peak = torch.cuda.max_memory_allocated() - base if torch.cuda.is_available() else peak_of(profile)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (wire.num_bytes, *held, peak))
    sent, parameters, gradients, state = (statistics.mean(each) for each in list(zip(*everyone, strict=True))[:4])
    row = {"sent": sent, "parameters": parameters, "gradients": gradients, "state": state}
    return contender, row | {"peak": max(each[-1] for each in everyone), "loss": loss.item() / dist.get_world_size()}


def peak_of(profile: torch.profiler.profile) -> int:
    """The most that was allocated at any time of the third step, of what was allocated since the profile began."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    begin = next(event["ts"] for event in events if event["name"] == "third step")
    total, peak = 0, 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        total += event["args"]["Bytes"]
        peak = max(peak, total) if event["ts"] >= begin else 0
    return peak


def check_losses(rows: dict[str, dict[str, Any]]) -> None:
    """All contenders train the same model, so their losses after two steps are equal but for rounding."""
    for optimizer, tolerance in (("AdamW", 1e-4), ("Muon", 1e-2)):
        losses = {name: row["loss"] for name, row in rows.items() if ("Muon" in name) == (optimizer == "Muon")}
        if losses and max(losses.values()) - min(losses.values()) > tolerance:
            raise RuntimeError(f"the contenders with {optimizer} differ in what they compute: {losses}")


def record_timeline(contender: Contender, batches: Sequence[Tensor], path: str) -> None:
    """Write when the parts of a step and its communication ran on all ranks, for https://ui.perfetto.dev."""
    contender.wait()
    dist.barrier()
    spans: list[tuple[str, str, float, float]] = []
    returns, stop = contender.mode._all_gather, threading.Event()
    wire = Wire()
    watcher = threading.Thread(target=watch, args=(wire, returns, spans, stop))
    watcher.start()
    with wire:
        for parts in (batches, batches):
            began = time.monotonic()
            contender.backward(parts)
            middle = time.monotonic()
            contender.step()
            spans += [("host", "forward and backward", began, middle), ("host", "step", middle, time.monotonic())]
        contender.wait()
    stop.set()
    watcher.join()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, spans)
    if dist.get_rank() == 0:
        events = [
            {"name": name, "ph": "X", "pid": rank, "tid": lane, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
            for rank, of_rank in enumerate(everyone)
            for lane, name, start, end in of_rank
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}))


def watch(wire: Wire, returns: Any, spans: list[tuple[str, str, float, float]], stop: threading.Event) -> None:
    """Note when exchanges are done, and when new values have been waited for, to 0.2 ms."""
    known, on_the_way = 0, dict[int, float]()
    pending: list[tuple[str, float, dist.Work]] = []
    while not stop.is_set() or pending or on_the_way:
        time.sleep(2e-4)
        pending += [call for call in wire.calls[known:] if call[0] == "alltoall_base_"]
        known, now = len(wire.calls), time.monotonic()
        for call in [call for call in pending if call[2].is_completed()]:
            pending.remove(call)
            spans.append(("reduction", "bucket of gradients", call[1], now))
        travelling = tuple(returns.travelling)
        arrived = [index for index in on_the_way if index not in travelling]
        spans += [("return", f"bucket {index} of values", on_the_way.pop(index), now) for index in arrived]
        on_the_way |= {index: now for index in travelling if index not in on_the_way}


def table(rows: Sequence[dict[str, Any]], *, exposed: bool) -> str:
    heads = ["ranks", "contender", "ms per step", "of DDP + Zero", "of DDP + AdamW", "MiB sent"]
    heads += ["MiB held: parameters", "gradients", "state", "peak MiB", *(["ms exposed"] if exposed else [])]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in rows:
        base = {each["name"]: each["plain"] for each in rows if each["ranks"] == row["ranks"]}
        ratios = [f"{row['plain'] / base[name]:.2f}" if name in base else "" for name in (ZERO, DDP)]
        sizes = [f"{row[key] / MIB:.1f}" for key in ("sent", "parameters", "gradients", "state", "peak")]
        cells = [str(row["ranks"]), row["name"], f"{1e3 * row['plain']:.0f}", *ratios, *sizes]
        cells += [f"{1e3 * (row['observed'] - row['muted']):.0f}"] if exposed else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="per turn")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--words", type=int, default=8000)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--bucket-mib", type=float, default=4.0, help="of zero2, ddp and torch's DDP")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of contenders")
    parser.add_argument("--exposed", action="store_true", help="measure also without communication")
    parser.add_argument("--timeline", help="file for a Chrome trace of two steps of zero2")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    rows = [row for ranks in arguments.ranks for row in run_on_ranks(worker, ranks, arguments, num_ranks=ranks)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(table(rows, exposed=arguments.exposed))


if __name__ == "__main__":
    main()
