"""Training steps over a slow link: time, traffic and loss for every way to keep two nodes together; needs root.

    python -m benchmarks.slow_network --ranks-per-node 1 2 --rates unlimited 1gbit 100mbit 10mbit

Two network namespaces are the nodes, a veth pair is the link, and a token bucket of the kernel (``tbf``) at both ends
limits each direction to the rate; it adds no delay. torchrun starts the ranks, one thread each, which train a T5 of 10
million parameters from random weights on generated text. One contender at a time: HSDP (FSDP2 on a 2-D mesh) with AdamW
and with ParallelMuon, FlexDeMo (FSDP2 within the node), and *no exchange*, nodes that do not talk to each other.

- *loss*: of held-out text after ``--loss-steps`` steps without limit, for the best of ``--lrs``, which is named. The
  data are the same for all contenders, but not for other numbers of ranks.
- *s per step*: median of the steps after ``--warmup`` ones, slowest rank; in parentheses how many times faster than
  HSDP + AdamW. Steps are measured for about ``--seconds``, at least 2 and at most ``--steps``.
- *MB sent*: bytes that leave a node in a step, from the counters of its device, so with headers and acknowledgements;
  mean over both nodes, the largest of all rates.

The namespaces are removed with all that runs in them however this script ends. Where there can be none it says so.
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
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import lightning_muon
from benchmarks.namespaces import TwoNodes, sent_bytes, set_rate, why_not
from benchmarks.tables import ROOT, markdown, origin, parser_of
from lightning_muon.comm.agreement import gather
from lightning_muon.compat.torch import let_gloo_finish_at_exit

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
NUM_NODES = 2
NUM_HELD_OUT = 8
BASELINE = "HSDP + AdamW"
# With 4 layers 10.0 million parameters; no dropout, so that contenders differ in nothing but how they train.
MODEL = {"vocab_size": 10240, "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_heads": 8, "dropout_rate": 0.0}
NUM_WORDS = 512  # Of the vocabulary, those that occur.
REPETITION = 0.75


@dataclass(kw_only=True)
class Contender:
    """A model on its ranks, and its optimizer."""

    net: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
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


Maker = Callable[[DeviceMesh, float, argparse.Namespace], Contender]


def fsdp(
    make: Callable[..., torch.optim.Optimizer],
    mesh: DeviceMesh,
    lr: float,
    job: argparse.Namespace,
    *,
    in_node: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> Contender:
    """FSDP2 for each block and for the rest, in each node, or as HSDP, which averages gradients over the nodes."""
    net, on = new_net(job.layers), mesh["shard"] if in_node else mesh
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for unit in [*(module for module in net.modules() if isinstance(module, T5Block)), net]:
        fully_shard(unit, mesh=on, mp_policy=policy)
    return Contender(net=net, optimizer=make(net, lr))


def flexdemo(
    mesh: DeviceMesh, lr: float, job: argparse.Namespace, *, top_k: int | None = None, **options: Any
) -> Contender:
    """Chunks of 64 x 64; ``top_k=0``: no replication, ``None``: the default."""
    if top_k is not None:
        options["replicator"] = lightning_muon.DCTTopK(top_k=top_k) if top_k else lightning_muon.NoReplication()
    return fsdp(partial(lightning_muon.FlexDeMo, mesh=mesh, **options), mesh, lr, job, in_node=True)


def adamw(net: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr, weight_decay=0.0)


CONTENDERS: dict[str, Maker] = {
    "no exchange: FSDP2 + AdamW": partial(fsdp, adamw, in_node=True),
    "no exchange: FlexDeMo sgd, NoReplication": partial(flexdemo, top_k=0, base="sgd"),
    BASELINE: partial(fsdp, adamw),
    "HSDP + AdamW, gradients reduced in bf16": partial(fsdp, adamw, reduce_dtype=torch.bfloat16),
    "HSDP + ParallelMuon": partial(fsdp, partial(lightning_muon.ParallelMuon, weight_decay=0.0)),
    "FlexDeMo": flexdemo,
    "FlexDeMo sgd, k=32": partial(flexdemo, top_k=32, base="sgd"),
    "FlexDeMo sgd, k=8": partial(flexdemo, top_k=8, base="sgd"),
    "FlexDeMo adamw, k=32": partial(flexdemo, top_k=32, base="adamw"),
    "FlexDeMo muon, k=32": partial(flexdemo, top_k=32, base="muon"),
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
    names = chosen(arguments.contenders)
    for ranks_per_node in arguments.ranks_per_node:
        rows: dict[str, dict[str, Any]] = {}
        for name in names:
            rows[name] = run(name, ranks_per_node, arguments.timeout)
            print(f"2 x {ranks_per_node}, {name}: {rows[name]}", file=sys.stderr, flush=True)
        print(f"\n2 nodes x {ranks_per_node}\n\n{table(rows, arguments.rates, arguments.loss_steps)}", flush=True)
    print(origin(__spec__.name))


def chosen(words: Sequence[str]) -> list[str]:
    """Names of the contenders that contain one of ``words``, in their order."""
    names = [name for name in CONTENDERS if any(word.lower() in name.lower() for word in words)]
    if not names:
        raise SystemExit(f"--contenders {' '.join(words)}: none of {', '.join(CONTENDERS)} has such a word in it")
    return names


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
    cells: list[list[str]] = []
    base = [each["seconds"] for each in rows.get(BASELINE, {}).get("rates", [])]
    for name, row in rows.items():
        if "failed" in row:
            cells.append([name, row["failed"], *[""] * (len(heads) - 2)])
            continue
        seconds = [each["seconds"] for each in row["rates"]]
        ratios = [f" ({old / new:.1f}x)" for old, new in zip(base, seconds, strict=True)] if base else [""] * len(rates)
        times = [f"{value:.3f}{ratio}" for value, ratio in zip(seconds, ratios, strict=True)]
        cells.append([name, *times, f"{max(each['sent'] for each in row['rates']) / 1e6:.2f}"])
        cells[-1] += [f"{row['loss']:.3f}", f"{row['lr']:g}"] if loss_steps else []
    return markdown(heads, cells)


def parse_arguments() -> argparse.Namespace:
    # Seconds and steps are those measured at each rate, at most; layers those of the encoder, and of the decoder.
    numbers = {"steps": 20, "seconds": 30.0, "warmup": 2, "batch": 8, "layers": 4, "timeout": 1800.0}
    parser = parser_of(__doc__, numbers)
    parser.add_argument("--ranks-per-node", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rates", nargs="+", default=["unlimited", "1gbit", "100mbit", "10mbit"])
    parser.add_argument("--contenders", nargs="+", default=[""], help="parts of their names; default: all")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2], help="to try for the loss")
    parser.add_argument("--loss-steps", type=int, default=60, help="0: no loss, and the first of --lrs for the times")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
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
    longest = gather(warmup[-1], None)
    num_steps = max(2, min(job.steps, int(job.seconds / max(longest))))
    before = counted()
    seconds = time_steps(contender, job, num_steps)
    sent = gather(counted() - before, None)
    medians = gather(statistics.median(seconds), None)
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


if __name__ == "__main__":
    main()
