"""Time, traffic and memory of whole training steps, for every way to divide gradients; ratios in one run.

    python -m benchmarks.gradient_sync --ranks 2 4

Takes turns between ``CONTENDERS``. A turn is ``--steps`` training steps of equal batches and ends when all parameters
have arrived. The table has the median over the turns of the slowest rank, and for one step:

- *sent*: bytes that leave a rank, mean over the ranks, from the calls of torch.distributed. Exact for messages and
  all-to-all; of reductions, gathers and broadcasts the least that they need, as rings reach it.
- *held*: tensors after backward and before the step: parameters, gradients, optimizer state; mean over the ranks.
- *peak*: the most that the allocator has given out at any time, activations included; the largest rank.
- *early*: the share of what backward sends that is handed to torch.distributed before the last matrix product of
  backward begins, in the order of calls: all that may travel while backward computes. It is the point of ``--compile``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.loss import GPT
from benchmarks.ranks import run_on_ranks
from benchmarks.tables import markdown, origin, parser_of
from lightning_muon import ParallelMuon
from lightning_muon.comm.agreement import gather
from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode

LR, WEIGHT_DECAY = 1e-3, 0.01
MIB = 2**20
_NOTHING = nullcontext()


@dataclass(kw_only=True)
class Contender:
    """A model and its optimizers, and what has to be called around them."""

    net: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    no_sync: Callable[[], AbstractContextManager[Any]]  # For all micro-batches but the last.
    finish_gradients: Callable[[], None] = lambda: None  # After the last backward pass.
    wait: Callable[[], None] = lambda: None  # Until all parameters have arrived.
    gradient: Callable[[Tensor], Tensor | None] = lambda parameter: parameter.grad  # The rank's part of a reduced one.

    def backward(self, batches: Sequence[Tensor], inside: AbstractContextManager[Any] = _NOTHING) -> None:
        """Gradients of one step; autograd runs in the context ``inside``."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for index, tokens in enumerate(batches):
            with nullcontext() if index == len(batches) - 1 else self.no_sync():
                loss = F.cross_entropy(self.net(tokens).flatten(0, 1), tokens.flatten())
                with inside:
                    (loss / len(batches)).backward()
        self.finish_gradients()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def held(self) -> tuple[int, int, int]:
        """Bytes of parameters, gradients and optimizer state on this rank; call it before :meth:`step`."""
        parameters = list(self.net.parameters())
        gradients = [self.gradient(parameter) for parameter in parameters]
        inner = [getattr(optimizer, "optim", optimizer) for optimizer in self.optimizers]
        state = [value for each in inner for values in each.state.values() for value in values.values()]
        return num_bytes(parameters), num_bytes(gradients), num_bytes(state)


def num_bytes(tensors: Iterable[Any]) -> int:
    """Size of the memory of the local parts, shared memory once."""
    found = [local_tensor(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in found}.values())


def muon(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [ParallelMuon(net, LR, WEIGHT_DECAY)]


def adamw(net: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(net.parameters(), LR, weight_decay=WEIGHT_DECAY)]


def planned_adamw(net: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [ParallelMuon(net, LR, WEIGHT_DECAY, algorithm="adamw", **options)]


def torch_muon(net: GPT) -> list[torch.optim.Optimizer]:
    matrices = [p for p in net.blocks.parameters() if p.ndim == 2]
    rest = [p for p in net.parameters() if all(p is not matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, LR, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, LR, weight_decay=WEIGHT_DECAY),
    ]


def zero(net: nn.Module) -> list[torch.optim.Optimizer]:
    options: dict[str, Any] = {"parameters_as_bucket_view": True, "lr": LR, "weight_decay": WEIGHT_DECAY}
    return [ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, **options)]


Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def ours(name: str, optimizers: Optimizers, arguments: argparse.Namespace, **options: Any) -> Contender:
    net = new_net(arguments)
    shape = (arguments.replicas, dist.get_world_size() // arguments.replicas)[arguments.replicas == 1 :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    mode = make_mode(name, mesh, ModeOptions(bucket_bytes=int(arguments.bucket_mib * MIB), **options))
    mode.prepare(net)
    made = optimizers(net)
    mode.attach(net, made)
    return Contender(
        net=net,
        optimizers=made,
        no_sync=mode.no_sync,
        finish_gradients=mode.finish_gradients,
        wait=mode.finish_parameters,
        gradient=mode.layout.gradient,
    )


def distributed_data_parallel(optimizers: Optimizers, arguments: argparse.Namespace) -> Contender:
    # As views of the buckets, so that gradients are not held twice.
    net = DistributedDataParallel(new_net(arguments), gradient_as_bucket_view=True, bucket_cap_mb=arguments.bucket_mib)
    return Contender(net=net, optimizers=optimizers(net.module), no_sync=net.no_sync)


def fsdp2(optimizers: Optimizers, arguments: argparse.Namespace) -> Contender:
    net = new_net(arguments)
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)

    def set_sync(enabled: bool) -> None:
        net.set_requires_gradient_sync(enabled)
        net.set_is_last_backward(enabled)

    @contextmanager
    def no_sync() -> Generator[None]:
        set_sync(False)
        yield
        set_sync(True)

    return Contender(net=net, optimizers=optimizers(net), no_sync=no_sync)


def new_net(arguments: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    net = GPT(words=arguments.words, width=arguments.width, layers=arguments.layers, context=arguments.length)
    for module in {"blocks": net.blocks, "model": [net]}.get(arguments.compile, []):
        module.compile()
    return net


CONTENDERS: dict[str, Callable[[argparse.Namespace], Contender]] = {
    "zero2 + ParallelMuon": partial(ours, "zero2", muon),
    "fsdp + ParallelMuon": partial(ours, "fsdp", muon, accumulate="sharded"),
    'fsdp, accumulate="whole" + ParallelMuon': partial(ours, "fsdp", muon, accumulate="whole"),
    "ddp + ParallelMuon": partial(ours, "ddp", muon),
    "torch DDP + torch.optim.Muon and AdamW": partial(distributed_data_parallel, torch_muon),
    "zero2 + AdamW": partial(ours, "zero2", planned_adamw),
    # As the other contenders, which do not look for NaN.
    "zero2 + AdamW, error_if_nonfinite=False": partial(ours, "zero2", partial(planned_adamw, error_if_nonfinite=False)),
    "torch DDP + ZeroRedundancyOptimizer(AdamW)": partial(distributed_data_parallel, zero),
    "ddp + AdamW": partial(ours, "ddp", adamw),
    "torch DDP + AdamW": partial(distributed_data_parallel, adamw),
    "fsdp + AdamW": partial(ours, "fsdp", adamw),
    "FSDP2 + AdamW (ModelParallelStrategy)": partial(fsdp2, adamw),
}


class Wire(TorchDispatchMode):
    """Counts the bytes that leave this rank inside of it."""

    num_bytes = 0.0
    num_early_bytes = 0.0  # Before the last matrix product.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            self.num_early_bytes = self.num_bytes
        if func.namespace == "c10d" and func.overloadpacket.__name__ != "barrier":
            self.num_bytes += bytes_out(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))


def bytes_out(name: str, args: Any) -> float:
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


def worker(num_ranks: int, chosen: Sequence[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the chosen contenders; every rank must call it, and gets all rows."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (arguments.accumulate, arguments.batch, arguments.length)
    batches = list(torch.randint(arguments.words, shape, generator=generator))
    contenders: dict[str, Contender] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in chosen:
        contenders[name], rows[name] = measure_memory(CONTENDERS[name], batches, arguments)
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(arguments.rounds):
        for name, values in seconds.items():
            values.append(time_steps(contenders[name], batches, arguments.steps))
    for name, values in seconds.items():
        rows[name]["seconds"] = statistics.median(values)
    return [{"ranks": num_ranks, "name": name} | row for name, row in rows.items()]


def time_steps(contender: Contender, batches: Sequence[Tensor], steps: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        contender.backward(batches)
        contender.step()
    contender.wait()
    dist.barrier()
    return (time.perf_counter() - started) / steps


def measure_memory(
    make: Callable[[argparse.Namespace], Contender], batches: Sequence[Tensor], arguments: argparse.Namespace
) -> tuple[Contender, dict[str, Any]]:
    """Make a contender and take four steps; bytes that are held in the third one and sent in the fourth."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        contender = make(arguments)
        for _ in range(2):
            contender.backward(batches)
            contender.step()
        contender.wait()
        with torch.profiler.record_function("third step"):
            contender.backward(batches, in_backward := Wire())
            held = contender.held()
            contender.step()
            contender.wait()
    # Dynamo would leave code that it meets in a dispatch mode for ever uncompiled.
    with torch.compiler.set_stance("force_eager"), Wire() as wire:
        contender.backward(batches)
        contender.step()
        contender.wait()
    early = in_backward.num_early_bytes / (in_backward.num_bytes or 1)
    everyone = gather((early, wire.num_bytes, *held, peak_of(profile)), None)
    means = [statistics.mean(each) for each in zip(*everyone, strict=True)]
    row = dict(zip(("early", "sent", "parameters", "gradients", "state"), means, strict=False))
    return contender, row | {"peak": max(each[-1] for each in everyone)}


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


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ["ranks", "contender", "ms per step", "MiB sent", "MiB held: parameters", "gradients", "state"]
    heads += ["peak MiB", "early"]
    cells: list[list[str]] = []
    for row in rows:
        cells.append([str(row["ranks"]), row["name"], f"{1e3 * row['seconds']:.0f}"])
        cells[-1] += [f"{row[key] / MIB:.1f}" for key in ("sent", "parameters", "gradients", "state", "peak")]
        cells[-1].append(f"{row['early']:.2f}")
    return markdown(heads, cells)


def parse_arguments() -> argparse.Namespace:
    numbers = {"rounds": 7, "steps": 3, "layers": 8, "width": 256, "words": 8000, "batch": 2, "length": 32}
    # Micro-batches of a step, and replicas of the modes of this package.
    parser = parser_of(__doc__, numbers | {"accumulate": 1, "replicas": 1})
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--bucket-mib", type=float, default=4.0, help="of zero2, ddp and torch's DDP")
    parser.add_argument("--compile", choices=["nothing", "blocks", "model"], default="nothing")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of contenders")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    chosen = [name for name in CONTENDERS if any(word in name for word in arguments.only)]
    # Dynamo remembers functions that it could not compile for one model: compiled ones have processes of their own.
    runs = [chosen] if arguments.compile == "nothing" else [[name] for name in chosen]
    rows: list[dict[str, Any]] = []
    for ranks, names in product(arguments.ranks, runs):
        rows += run_on_ranks(worker, ranks, names, arguments, num_ranks=ranks)
    print(table(rows))
    print(origin(__spec__.name))


if __name__ == "__main__":
    main()
