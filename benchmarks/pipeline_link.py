"""A pipeline over two nodes against FSDP and HSDP of the same model: seconds and bytes of a step; needs root.

    python benchmarks/pipeline_link.py --rates unlimited 100mbit

Two network namespaces are the nodes, a veth pair is the link, and a token bucket of the kernel at both ends limits each
direction to the rate. torchrun starts the ranks, one thread each, which train a Llama of 12.6 million parameters with
Fabric and ParallelMuon; all contenders see the same rows in a step. *s per step* is the median on the slowest rank, *MB
sent* what leaves a node in a step, headers included, from the counters of its device (the mean over both nodes).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from namespaces import TwoNodes, sent_bytes, set_rate, why_not
from slow_network import parse_rate, wait
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_muon import ParallelMuonFabricStrategy, forward_backward

NUM_NODES = 2
MODEL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
VOCAB_SIZE = 8192


def contenders(ranks_per_node: int) -> dict[str, dict[str, Any]]:
    """Options of the strategy."""
    found: dict[str, dict[str, Any]] = {
        "FSDP": {"shard_size": NUM_NODES * ranks_per_node},
        "HSDP": {"replicate_size": NUM_NODES, "shard_size": ranks_per_node},
    }
    for schedule in ("1f1b", "zb_h1"):
        found[f"pipeline of 2, {schedule}"] = {
            "pipeline_size": NUM_NODES,
            "shard_size": ranks_per_node,
            "pipeline_schedule": schedule,
            "pipeline_microbatches": 8,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--rates", nargs="+", default=["unlimited", "100mbit"])
    parser.add_argument("--rows", type=int, default=32, help="of a step, of all ranks together")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=5, help="measured at each rate, after one")
    arguments = parser.parse_args()
    rates = [parse_rate(rate) for rate in arguments.rates]
    if "RANK" in os.environ:
        work(arguments, rates)
        return
    result = run_on_two_nodes(arguments.ranks_per_node)
    if result is not None:
        print(table(result, arguments.rates))


def run_on_two_nodes(ranks_per_node: int) -> Any:
    """Run this script with its options on all ranks; what rank 0 writes to ``$RESULT``, ``None`` without namespaces."""
    reason = why_not()
    if reason is not None:
        print(f"skipped: {reason}")
        return None
    with tempfile.TemporaryDirectory() as folder, TwoNodes() as nodes:
        result, log_file = Path(folder, "result.json"), Path(folder, "log.txt")
        environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "HF_HUB_OFFLINE": "1", "RESULT": str(result)}
        with log_file.open("wb") as log:
            launchers = nodes.torchrun(sys.argv, ranks_per_node, log=log, environment=environment)
            failed = wait(launchers, 1800)
        if failed:
            raise SystemExit(f"{log_file.read_text(errors='replace')[-6000:]}\n{failed}")
        return json.loads(result.read_text())


class Training:
    """A model with a strategy, and its rows."""

    def __init__(self, options: dict[str, Any], arguments: argparse.Namespace, *, num_nodes: int = NUM_NODES) -> None:
        strategy = ParallelMuonFabricStrategy(**options)
        self.fabric = Fabric(
            accelerator="cpu", devices=arguments.ranks_per_node, num_nodes=num_nodes, strategy=strategy
        )
        self.fabric.launch()
        torch.manual_seed(0)
        whole = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **MODEL))
        self.model, self.optimizer = self.fabric.setup(whole, torch.optim.AdamW(whole.parameters(), lr=1e-3))
        tokens = torch.randint(VOCAB_SIZE, (arguments.rows, arguments.length))
        sampler = strategy.distributed_sampler_kwargs
        own = tokens[sampler["rank"] :: sampler["num_replicas"]].contiguous()
        self.batch = {"input_ids": own, "labels": own}
        self.is_pipeline = "pipeline_size" in options

    def step(self) -> float:
        """Seconds of one."""
        started = time.perf_counter()
        if self.is_pipeline:
            forward_backward(self.model, self.batch)
        else:
            self.fabric.backward(self.model(**self.batch).loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def work(arguments: argparse.Namespace, rates: list[float | None]) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    rows: dict[str, list[tuple[float, float]]] = {}
    for name, options in contenders(arguments.ranks_per_node).items():
        training = Training(options, arguments)
        for rate in rates:
            dist.barrier()
            if os.environ["LOCAL_RANK"] == "0":
                set_rate(rate)
            training.step()
            before = counted()
            seconds = statistics.median(training.step() for _ in range(arguments.steps))
            sent = counted() - before
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, (seconds, sent))
            slowest, mean_sent = max(each[0] for each in found), statistics.fmean(each[1] for each in found)
            rows.setdefault(name, []).append((slowest, mean_sent / arguments.steps))
    if dist.get_rank() == 0:
        Path(os.environ["RESULT"]).write_text(json.dumps(rows))
    dist.barrier()


def counted() -> int:
    """Bytes that this node has sent, read while nobody sends. Collective; every rank must call it."""
    dist.barrier()
    num_bytes = sent_bytes()
    dist.barrier()
    return num_bytes


def table(rows: dict[str, list[tuple[float, float]]], rates: list[str]) -> str:
    """One line for each contender; ratios are to FSDP in the same run."""
    lines = [f"| strategy | {' | '.join(f's per step, {rate} | of FSDP' for rate in rates)} | MB sent |"]
    lines.append(f"|{' --- |' * (2 * len(rates) + 2)}")
    for name, found in rows.items():
        cells = [f"{own:.3f} | {own / base:.3f}" for (own, _), (base, _) in zip(found, rows["FSDP"], strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} | {max(sent for _, sent in found) / 1e6:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
