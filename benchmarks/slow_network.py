"""Training steps over a slow link: time and traffic for every way to keep two nodes together; needs root.

    python -m benchmarks.slow_network --ranks-per-node 1 2 --rates unlimited 1gbit 100mbit 10mbit

Two network namespaces are the nodes, a veth pair is the link, and a token bucket of the kernel (``tbf``) at both ends
limits each direction to the rate; it adds no delay. torchrun starts the ranks, one thread each, which train a T5 of 10
million parameters from random weights on random words, one contender at a time.

- *s per step*: median of the steps after ``--warmup`` ones, slowest rank; in parentheses how many times faster than
  HSDP + AdamW. Steps are measured for about ``--seconds``, at least 2 and at most ``--steps``.
- *MB sent*: bytes that leave a node in a step, from the counters of its device, so with headers and acknowledgements;
  mean over both nodes, the largest of all rates.

Where there can be no namespaces it says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
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
BASELINE = "HSDP + AdamW"
# With 4 layers 10.0 million parameters.
MODEL: dict[str, Any] = {"vocab_size": 10240, "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_heads": 8}
LR = 1e-3


def new_net(num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, num_layers=num_layers, **MODEL))


def batch_of(rows: int) -> dict[str, Tensor]:
    words = torch.randint(2, MODEL["vocab_size"], (2, rows, 16))  # 0 is padding, 1 the end.
    return {"input_ids": words[0], "labels": words[1]}


Contender = tuple[nn.Module, torch.optim.Optimizer]
Maker = Callable[[DeviceMesh, argparse.Namespace], Contender]


def fsdp(
    make: Callable[..., torch.optim.Optimizer],
    mesh: DeviceMesh,
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
    return net, make(net, LR)


def flexdemo(mesh: DeviceMesh, job: argparse.Namespace, *, top_k: int | None = None, **options: Any) -> Contender:
    """Chunks of 64 x 64; ``top_k=0``: no replication, ``None``: the default."""
    if top_k is not None:
        options["replicator"] = lightning_muon.DCTTopK(top_k=top_k) if top_k else lightning_muon.NoReplication()
    return fsdp(partial(lightning_muon.FlexDeMo, mesh=mesh, **options), mesh, job, in_node=True)


def adamw(net: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr, weight_decay=0.0)


CONTENDERS: dict[str, Maker] = {
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
    words = [word.lower() for word in arguments.contenders]
    names = [name for name in CONTENDERS if any(word in name.lower() for word in words)]
    if not names:
        raise SystemExit(f"none of {', '.join(CONTENDERS)} has one of the words {words}")
    for ranks_per_node in arguments.ranks_per_node:
        rows: dict[str, dict[str, Any]] = {}
        for name in names:
            rows[name] = run(name, ranks_per_node, arguments.timeout)
            print(f"2 x {ranks_per_node}, {name}: {rows[name]}", file=sys.stderr, flush=True)
        print(f"\n2 nodes x {ranks_per_node}\n\n{table(rows, arguments.rates)}", flush=True)
    print(origin(__spec__.name))


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
    if text == "unlimited":
        return None
    number, unit = text[:-4], text[-4:]
    if unit not in UNITS or not number.replace(".", "", 1).isdigit() or float(number) <= 0:
        raise ValueError(f"a rate is 'unlimited' or a number with kbit, mbit or gbit as in '100mbit', got {text!r}")
    return float(number) * UNITS[unit]


def table(rows: Mapping[str, Mapping[str, Any]], rates: Sequence[str]) -> str:
    heads = ["contender", *(f"s per step, {rate}" for rate in rates), "MB sent"]
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
    return markdown(heads, cells)


def parse_arguments() -> argparse.Namespace:
    # Seconds and steps are those measured at each rate, at most; layers those of the encoder, and of the decoder.
    numbers = {"steps": 20, "seconds": 30.0, "warmup": 2, "batch": 8, "layers": 4, "timeout": 1800.0}
    parser = parser_of(__doc__, numbers)
    parser.add_argument("--ranks-per-node", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rates", nargs="+", default=["unlimited", "1gbit", "100mbit", "10mbit"])
    parser.add_argument("--contenders", nargs="+", default=[""], help="parts of their names; default: all")
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
    contender = CONTENDERS[name](mesh, arguments)
    result = {"rates": [measure_rate(contender, arguments, rate) for rate in map(parse_rate, arguments.rates)]}
    if dist.get_rank() == 0:
        Path(result_file).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure_rate(contender: Contender, job: argparse.Namespace, rate: float | None) -> dict[str, float]:
    """Median seconds of a step on the slowest rank, and bytes that a node sends in a step, mean over both nodes."""
    quietly(partial(set_rate, rate) if os.environ["LOCAL_RANK"] == "0" else lambda: None)  # Both ends of the link.
    longest = gather(time_steps(contender, job, job.warmup)[-1], None)
    num_steps = max(2, min(job.steps, int(job.seconds / max(longest))))
    before = quietly(sent_bytes)
    seconds = time_steps(contender, job, num_steps)
    sent = statistics.mean(gather(quietly(sent_bytes) - before, None)) / num_steps
    return {"seconds": max(gather(statistics.median(seconds), None)), "sent": sent}


def quietly(function: Callable[[], Any]) -> Any:
    """Call it while nobody sends. Collective; every rank must call it."""
    dist.barrier()
    found = function()
    dist.barrier()
    return found


def time_steps(contender: Contender, job: argparse.Namespace, count: int) -> list[float]:
    net, optimizer = contender
    seconds = []
    for _ in range(count):
        batch, started = batch_of(job.batch), time.perf_counter()
        optimizer.zero_grad()
        net(**batch).loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
