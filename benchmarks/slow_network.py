"""Training steps over a slow link: time, traffic and loss for every way to keep two nodes together; needs root.

    python -m benchmarks.slow_network --ranks-per-node 1 2 --rates unlimited 1gbit 100mbit 10mbit

Two network namespaces are the nodes, a veth pair is the link, and a token bucket of the kernel (``tbf``) at both ends
limits each direction to the rate; it adds no delay. torchrun starts the ranks, one thread each, which train a T5 of 10
million parameters from random weights on generated text (forward, backward, optimizer). One contender at a time:

- HSDP (FSDP2 on a 2-D mesh) with AdamW, gradients in fp32 or bf16 on the wire, and with ParallelMuon,
- FlexDeMo with its base optimizers and two numbers of components (FSDP2 within the node),
- DeToNATION, the code of the FlexDeMo paper's authors, with ``--detonation FOLDER``: it is installed there from PyPI,
  with nothing but what it imports, and used from there as it is,
- *no exchange*: nodes that do not talk to each other, which no exchange can beat in time.

For each number of ranks and contender:

- *loss*: of held-out text after ``--loss-steps`` steps without limit, for the best of ``--lrs``, which is named. The
  data are the same for all contenders, but not for other numbers of ranks. Contenders without exchange have a loss too:
  the mean of two models, each trained on its own half of the data.
- *s per step*: median of the steps after ``--warmup`` ones, slowest rank; in parentheses how many times faster than
  HSDP + AdamW. Steps are measured for about ``--seconds``, at least 2 and at most ``--steps``.
- *MB sent*: bytes that leave a node in a step (one direction; as many arrive), from the counters of its device, so with
  headers and acknowledgements; mean over both nodes, the largest of all rates. 1 MB = 10^6 bytes.

The namespaces are removed with all that runs in them however this script ends. Where there can be none (no root, no
``ip`` or ``tc``) it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import lightning_muon
from benchmarks.namespaces import TwoNodes, sent_bytes, set_rate, why_not
from lightning_muon.compat.torch import let_gloo_finish_at_exit

ROOT = Path(__file__).resolve().parent.parent
PEER = ("detonation==0.5.2", "einops==0.8.2", "mltiming==0.0.5")
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
Rows = dict[str, dict[str, Any]]
NUM_NODES = 2
NUM_HELD_OUT = 8
BASELINE = "HSDP + AdamW"
# With 4 layers 10.0 million parameters; no dropout, so that contenders differ in nothing but how they train.
MODEL = {"vocab_size": 10240, "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_heads": 8, "dropout_rate": 0.0}
NUM_WORDS = 512  # Of the vocabulary, those that occur.
REPETITION = 0.75


@dataclass(kw_only=True)
class Contender:
    """A model on its ranks, and its optimizer.

    Attributes:
        net: What is called.
        optimizer: Of all of its parameters.
        around_backward: A context for forward and backward.
    """

    net: nn.Module
    optimizer: torch.optim.Optimizer
    around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext

    def step(self, batch: dict[str, Tensor]) -> None:
        """One whole training step."""
        self.optimizer.zero_grad()
        with self.around_backward():
            self.net(**batch).loss.backward()
        self.optimizer.step()


def new_net(num_layers: int) -> nn.Module:
    """Equal on all ranks. The embedding of T5 is drawn ten times as large as the rest; short runs would not move it."""
    torch.manual_seed(0)
    net = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, num_layers=num_layers, **MODEL))
    with torch.no_grad():
        net.get_input_embeddings().weight.mul_(0.1)
    return net


def make_batch(generator: torch.Generator, samples: int, *, source: int = 16, target: int = 16) -> dict[str, Tensor]:
    """A walk over words, the target being how the source goes on.

    Words are drawn with probabilities 1 / rank; with probability :data:`REPETITION` a word is followed by its
    successor, which is fixed. What there is to learn: which words occur, how often, and what follows them.
    """
    frequencies = 1 / torch.arange(1, NUM_WORDS + 1)
    successors = torch.randperm(NUM_WORDS, generator=torch.Generator().manual_seed(0))
    drawn = torch.multinomial(frequencies, samples * (source + target), True, generator=generator)
    walk = drawn.view(samples, -1)
    follows = torch.rand(walk.shape, generator=generator) < REPETITION
    for place in range(1, source + target):
        walk[:, place] = torch.where(follows[:, place], successors[walk[:, place - 1]], walk[:, place])
    words = walk + 2  # 0 is padding, 1 the end.
    return {"input_ids": words[:, :source].contiguous(), "labels": words[:, source:].contiguous()}


def sharded(mesh: DeviceMesh, job: argparse.Namespace, *, reduce_dtype: torch.dtype | None = None) -> nn.Module:
    """FSDP2 for each block and for the rest; on a 2-D mesh that is HSDP, which averages gradients over the nodes."""
    net = new_net(job.layers)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for block in [module for module in net.modules() if isinstance(module, T5Block)]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def alone(mesh: DeviceMesh, lr: float, job: argparse.Namespace) -> Contender:
    net = sharded(mesh["shard"], job)
    return Contender(net=net, optimizer=torch.optim.AdamW(net.parameters(), lr, weight_decay=0.0))


def adamw(
    mesh: DeviceMesh, lr: float, job: argparse.Namespace, *, reduce_dtype: torch.dtype | None = None
) -> Contender:
    net = sharded(mesh, job, reduce_dtype=reduce_dtype)
    return Contender(net=net, optimizer=torch.optim.AdamW(net.parameters(), lr, weight_decay=0.0))


def parallel_muon(mesh: DeviceMesh, lr: float, job: argparse.Namespace) -> Contender:
    net = sharded(mesh, job)
    return Contender(net=net, optimizer=lightning_muon.ParallelMuon(net, lr, weight_decay=0.0))


def flexdemo(mesh: DeviceMesh, lr: float, job: argparse.Namespace, *, top_k: int, **options: Any) -> Contender:
    """Chunks of 64; ``top_k=0``: no replication."""
    replicator = lightning_muon.DCTTopK(chunk_size=64, top_k=top_k) if top_k else lightning_muon.NoReplication()
    net = sharded(mesh["shard"], job)
    return Contender(net=net, optimizer=lightning_muon.FlexDeMo(net, lr, mesh=mesh, replicator=replicator, **options))


def detonation(mesh: DeviceMesh, lr: float, job: argparse.Namespace, *, top_k: int) -> Contender:
    """As its README says under "Usage": FSDP1, gradients not synchronized in backward, the step does it."""
    # Last, so that it cannot hide anything else. It is no dependency of this package.
    sys.path.append(job.detonation)
    from detonation import DeMoReplicator, DeToSGD

    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    net = FullyShardedDataParallel(
        new_net(job.layers),
        process_group=groups,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block}),
    )
    optimizer = DeToSGD(
        net.parameters(),
        lr=lr,
        replicator=DeMoReplicator(compression_topk=top_k),
        sharding_parallel_group=groups[0],
        replication_parallel_group=groups[1],
    )
    return Contender(net=net, optimizer=optimizer, around_backward=net.no_sync)


Maker = Callable[[DeviceMesh, float, argparse.Namespace], Contender]
CONTENDERS: dict[str, Maker] = {
    "no exchange: FSDP2 + AdamW": alone,
    "no exchange: FlexDeMo sgd, NoReplication": partial(flexdemo, top_k=0),
    BASELINE: adamw,
    "HSDP + AdamW, gradients reduced in bf16": partial(adamw, reduce_dtype=torch.bfloat16),
    "HSDP + ParallelMuon": parallel_muon,
    "FlexDeMo sgd, k=32": partial(flexdemo, top_k=32),
    "FlexDeMo sgd, k=8": partial(flexdemo, top_k=8),
    "FlexDeMo adamw, k=32": partial(flexdemo, top_k=32, base="adamw"),
    "FlexDeMo muon, k=32": partial(flexdemo, top_k=32, base="muon"),
    "DeToNATION 0.5.2 sgd, k=4": partial(detonation, top_k=4),
    "DeToNATION 0.5.2 sgd, k=32": partial(detonation, top_k=32),
}


def main() -> None:
    arguments = parse_arguments()
    if arguments.work:
        work(arguments)
        return
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    names = chosen(arguments.contenders, with_peer=bool(arguments.detonation))
    if arguments.detonation:
        install(Path(arguments.detonation))
    for ranks_per_node in arguments.ranks_per_node:
        rows: Rows = {}
        for name in names:
            rows[name] = run(name, ranks_per_node, arguments.timeout)
            print(f"2 x {ranks_per_node}, {name}: {rows[name]}", file=sys.stderr, flush=True)
        print(f"\n2 nodes x {ranks_per_node}\n\n{table(rows, arguments.rates, arguments.loss_steps)}", flush=True)


def chosen(words: Sequence[str], *, with_peer: bool) -> list[str]:
    """Names of the contenders that contain one of ``words``, in their order."""
    names = [name for name in CONTENDERS if any(word.lower() in name.lower() for word in words)]
    if not names:
        raise SystemExit(
            f"--contenders {' '.join(words)}: none of these has such a word in it: {', '.join(CONTENDERS)}"
        )
    left_out = [name for name in names if name.startswith("DeToNATION") and not with_peer]
    if left_out:
        print(f"left out, since there is no --detonation FOLDER: {', '.join(left_out)}", file=sys.stderr)
    return [name for name in names if name not in left_out]


def install(folder: Path) -> None:
    """Without what they depend on: torch and numpy of this environment are what all contenders use."""
    if not (folder / "detonation").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PEER]
        subprocess.run(command, check=True)


def run(name: str, ranks_per_node: int, timeout: float) -> dict[str, Any]:
    """What the ranks have measured; ``{"failed": why}`` if they could not. Fresh nodes for each contender."""
    with tempfile.TemporaryDirectory() as folder, TwoNodes() as nodes:
        result, log_file = Path(folder, "result.json"), Path(folder, "log.txt")
        environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        with log_file.open("wb") as log:
            words = ["-m", "benchmarks.slow_network", *sys.argv[1:], "--work", name, str(result)]
            launchers = nodes.torchrun(words, ranks_per_node, log=log, environment=environment)
            reason = wait(launchers, timeout)
        if reason is None and result.exists():
            return json.loads(result.read_text())
        print(log_file.read_text(errors="replace")[-6000:], file=sys.stderr)
        return {"failed": reason or "no result"}


def wait(launchers: Sequence[subprocess.Popen[bytes]], timeout: float) -> str | None:
    """Until all have ended well (``None``), one has failed, or the time is over."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [launcher.poll() for launcher in launchers]
        if any(codes):
            return f"exit status {max(abs(code) for code in codes if code)}"
        if None not in codes:
            return None
        time.sleep(0.1)
    return f"not done after {timeout:.0f} s"


def parse_rate(text: str) -> float | None:
    """``"100mbit"`` -> 1e8; ``"unlimited"`` -> ``None``."""
    if text == "unlimited":
        return None
    number, unit = text[:-4], text[-4:]
    if unit not in UNITS or not number.replace(".", "", 1).isdigit() or float(number) <= 0:
        raise ValueError(f"a rate is 'unlimited' or a number with kbit, mbit or gbit as in '100mbit', got {text!r}")
    return float(number) * UNITS[unit]


def table(rows: Mapping[str, Mapping[str, Any]], rates: Sequence[str], loss_steps: int) -> str:
    heads = ["contender", *(f"s per step, {rate}" for rate in rates), "MB sent"]
    heads += [f"loss after {loss_steps} steps", "lr"] if loss_steps else []
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    base = [each["seconds"] for each in rows.get(BASELINE, {}).get("rates", [])]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | {' | '.join([row['failed']] + [''] * (len(heads) - 2))} |")
            continue
        seconds = [each["seconds"] for each in row["rates"]]
        ratios = [f" ({old / new:.1f}x)" for old, new in zip(base, seconds, strict=True)] if base else [""] * len(rates)
        times = [f"{value:.3f}{ratio}" for value, ratio in zip(seconds, ratios, strict=True)]
        cells = [name, *times, f"{max(each['sent'] for each in row['rates']) / 1e6:.2f}"]
        cells += [f"{row['loss']:.3f}", f"{row['lr']:g}"] if loss_steps else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-node", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rates", nargs="+", default=["unlimited", "1gbit", "100mbit", "10mbit"])
    parser.add_argument("--contenders", nargs="+", default=[""], help="parts of their names; default: all")
    parser.add_argument("--detonation", metavar="FOLDER", help="install DeToNATION there, if it is not, and measure it")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], help="to try for the loss")
    parser.add_argument("--loss-steps", type=int, default=60, help="0: no loss, and the first of --lrs for the times")
    parser.add_argument("--steps", type=int, default=20, help="measured at each rate, at most")
    parser.add_argument("--seconds", type=float, default=30, help="measured at each rate, about")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--layers", type=int, default=4, help="of the encoder, and of the decoder")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one contender")
    parser.add_argument("--quick", action="store_true", help="few steps, no loss, 100 Mbit/s, one rank per node")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        quick = {"ranks_per_node": [1], "rates": ["100mbit"], "loss_steps": 0, "steps": 4, "seconds": 5, "warmup": 1}
        vars(arguments).update(quick)
    for rate in arguments.rates:
        parse_rate(rate)
    return arguments


def work(arguments: argparse.Namespace) -> None:
    """What each rank does, under torchrun."""
    name, result_file = arguments.work
    torch.set_num_threads(1)
    # FSDP2 warns of T5's blocks, FSDP1 of groups of one rank, torch of names that others call.
    warnings.simplefilter("ignore")
    let_gloo_finish_at_exit()
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    shape = NUM_NODES, dist.get_world_size() // NUM_NODES
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    result = measure(CONTENDERS[name], mesh, arguments)
    if dist.get_rank() == 0:
        Path(result_file).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure(make: Maker, mesh: DeviceMesh, job: argparse.Namespace) -> dict[str, Any]:
    """Loss for each learning rate, then seconds and bytes for each rate with the best one.

    Collective over all ranks; every rank must call it.
    """
    losses = [loss_after(make(mesh, lr, job), job) for lr in job.lrs] if job.loss_steps else []
    finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
    best = finite.index(min(finite)) if finite else 0
    contender = make(mesh, job.lrs[best], job)
    rows = [measure_rate(contender, job, rate) for rate in map(parse_rate, job.rates)]
    return {"lr": job.lrs[best], "loss": losses[best] if losses else None, "losses": losses, "rates": rows}


def loss_after(contender: Contender, job: argparse.Namespace) -> float:
    """Mean loss of held-out batches after the steps of a trial; without a limit of the rate."""
    set_rate_of_node(None)
    for batch in batches(job, seed=1, count=job.loss_steps):
        contender.step(batch)
    contender.optimizer.zero_grad()
    with torch.no_grad():
        loss = sum(contender.net(**batch).loss for batch in batches(job, seed=2, count=NUM_HELD_OUT)) / NUM_HELD_OUT
    dist.all_reduce(loss)
    return (loss / dist.get_world_size()).item()


def measure_rate(contender: Contender, job: argparse.Namespace, rate: float | None) -> dict[str, float]:
    """Median seconds of a step on the slowest rank, and bytes that a node sends in a step, mean over both nodes."""
    set_rate_of_node(rate)
    warmup = time_steps(contender, job, job.warmup)
    longest = everywhere(warmup[-1])
    num_steps = max(2, min(job.steps, int(job.seconds / max(longest))))
    before = counted()
    seconds = time_steps(contender, job, num_steps)
    sent = everywhere(counted() - before)
    medians = everywhere(statistics.median(seconds))
    return {"seconds": max(medians), "sent": statistics.mean(sent) / num_steps, "steps": num_steps}


def counted() -> int:
    """Bytes that this node has sent, read while nobody sends. Collective; every rank must call it."""
    dist.barrier()
    num_bytes = sent_bytes()
    dist.barrier()
    return num_bytes


def time_steps(contender: Contender, job: argparse.Namespace, count: int) -> list[float]:
    seconds = []
    for batch in batches(job, seed=3, count=count):
        started = time.perf_counter()
        contender.step(batch)
        seconds.append(time.perf_counter() - started)
    return seconds


def batches(job: argparse.Namespace, *, seed: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Others on each rank, the same for all contenders."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return [make_batch(generator, job.batch) for _ in range(count)]


def set_rate_of_node(rate: float | None) -> None:
    """At both ends of the line, when nothing is on its way. Collective; every rank must call it."""
    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0":
        set_rate(rate)
    dist.barrier()


def everywhere(value: float) -> list[float]:
    """The value of each rank. Collective; every rank must call it."""
    values = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
    return [each.item() for each in values]


if __name__ == "__main__":
    main()
