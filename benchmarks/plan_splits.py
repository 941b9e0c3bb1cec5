"""What ``lightning-muon plan --splits`` says of time and memory beside real steps of all splits of 2 or 4 ranks; root.

    python benchmarks/plan_splits.py --ranks-per-node 2 --rate 100mbit

Two network namespaces are the nodes, as in pipeline_link.py, whose model is trained with Fabric and ParallelMuon, in
float32 and one thread per rank. The plan gets the FLOP/s of forward and backward of the whole model, run on all ranks
at once, and the rate of the link, which the ranks of a node share. *s* is the median of a step on the slowest rank,
*MB* the most that tensors of a rank take in a step, by the pages of its process. Times and memory are of two runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from namespaces import set_rate
from pipeline_link import MODEL, NUM_NODES, VOCAB_SIZE, Training, run_on_two_nodes
from slow_network import parse_rate
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_muon.cli.plan_model import Mesh, PlannedModel
from lightning_muon.cli.plan_modes import SPLIT_MODES, make_job, strategy_options
from lightning_muon.cli.plan_strategies import Setting
from lightning_muon.cli.split_rules import Job
from lightning_muon.cli.split_search import PlannedSplit, find_splits
from lightning_muon.compat.torch import cpu_multiplies_bfloat16_fast
from lightning_muon.config import MuonConfig
from lightning_muon.params.routing import route_module
from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape

SCHEDULES = ("1f1b", "zb_h1")
GIVES_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_UNBOUND_GIB = 1024.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rows", type=int, default=32, help="of a step, of all ranks together")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=5, help="measured of each split, after one")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        work(arguments)
        return
    times = run_on_two_nodes(arguments.ranks_per_node)
    if times is None:
        return
    os.environ |= GIVES_MEMORY_BACK  # A process that gives freed memory back at once is slow.
    flops, rows = times
    sizes = {name: numbers[2:] for name, *numbers in run_on_two_nodes(arguments.ranks_per_node)[1]}
    print(table(flops, [(name, *seconds[:2], *sizes[name]) for name, *seconds in rows]))


def plan(arguments: Namespace, flops_per_second: float) -> list[PlannedSplit]:
    """Every split, a pipeline with each of the schedules; the fastest first."""
    planned = planned_llama()
    cpu, rate = PRESETS["cpu"], parse_rate(arguments.rate)
    between = cpu.bandwidth[0] if rate is None else rate / 8 / arguments.ranks_per_node
    cost = CostModel(
        flops_per_second=flops_per_second,
        memory_bytes_per_second=cpu.memory_bytes_per_second,
        bandwidth=(cpu.bandwidth[0], between),
        latency_seconds=cpu.latency_seconds,
        op_seconds=cpu.op_seconds,
    )
    found: list[PlannedSplit] = []
    for schedule in SCHEDULES:
        asked, job = asked_of_plan(
            arguments, planned, cost, schedule, num_ranks=NUM_NODES * arguments.ranks_per_node, flops=flops_per_second
        )
        splits, _ = find_splits(asked, job, SPLIT_MODES, every_split=True)
        found += [each for each in splits if each.way.schedule or schedule == SCHEDULES[0]]
    return sorted(found, key=lambda each: each.step_seconds)


def planned_llama() -> PlannedModel:
    """The model, without memory."""
    with torch.device("meta"):
        module = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **MODEL))
    routes = zip(route_module(module).values(), module.parameters(), strict=True)
    shapes = tuple(ParameterShape(**vars(route), shape=tuple(each.shape)) for route, each in routes)
    return PlannedModel(shapes=ModelShapes(name="llama", source="", parameters=shapes), module=module)


def asked_of_plan(
    arguments: Namespace, planned: PlannedModel, cost: CostModel, schedule: str, *, num_ranks: int, flops: float
) -> tuple[Namespace, Job]:
    """Options of ``lightning-muon plan``, and what it makes of them: float32, nothing recomputed."""
    asked = Namespace(
        model_flops=flops,
        node_ranks=arguments.ranks_per_node,
        rows=arguments.rows,
        length=arguments.length,
        width=None,
        rank_memory=_UNBOUND_GIB,
        activations="kept",
        schedules=(schedule,),
        microbatches=8,
    )
    itemsize = 2 if cpu_multiplies_bfloat16_fast() else 4
    setting = Setting(
        model=planned.shapes,
        mesh=Mesh(1, 1),
        config=MuonConfig(compute_dtype="bfloat16" if itemsize == 2 else "float32"),
        wire_itemsize=itemsize,
        cost=cost,
        machine="cpu",
        is_cpu=True,
    )
    return asked, make_job(asked, setting, planned, "32-true", num_ranks=num_ranks)


def work(arguments: Namespace) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    first = Training({"shard_size": NUM_NODES * arguments.ranks_per_node}, arguments)  # Makes the process group.
    first.fabric.strategy.teardown()
    del first
    flops = torch.tensor(measured_flops(arguments), dtype=torch.float64)
    dist.all_reduce(flops)
    if os.environ["LOCAL_RANK"] == "0":
        set_rate(parse_rate(arguments.rate))
    rows: list[tuple[str, float, float, float, float]] = []
    for each in plan(arguments, float(flops) / dist.get_world_size()):
        training = Training(strategy_options(each.way), arguments)
        training.step()
        seconds = statistics.median(training.step() for _ in range(arguments.steps))
        most = torch.tensor([seconds, peak_bytes(training)], dtype=torch.float64)
        training.fabric.strategy.teardown()  # Or it would be in memory beside the next one.
        dist.all_reduce(most, dist.ReduceOp.MAX)
        split = each.way.split
        name = f"{split.pipeline} x {split.replicate} x {split.shard}, {each.way.name}"
        rows.append((name, each.step_seconds, float(most[0]), each.way.total, float(most[1])))
    if dist.get_rank() == 0:
        Path(os.environ["RESULT"]).write_text(json.dumps([float(flops) / dist.get_world_size(), rows]))
    dist.barrier()


def measured_flops(arguments: Namespace) -> float:
    """FLOP/s of a rank in forward and backward of the whole model, from the begin until the last rank is done."""
    module = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **MODEL))
    tokens = torch.randint(VOCAB_SIZE, (4, arguments.length))
    per_token = 2 * sum(p.numel() for name, p in module.named_parameters() if p.ndim == 2 and "embed" not in name)
    per_token += 4 * arguments.length * MODEL["hidden_size"] * MODEL["num_hidden_layers"]
    times = list[float]()
    for _ in range(4):
        dist.barrier()
        started = time.perf_counter()
        module(input_ids=tokens, labels=tokens).loss.backward()
        dist.barrier()  # Ranks that share a core do not get equal parts of it.
        times.append(time.perf_counter() - started)
        module.zero_grad()  # The plan counts the sums of several batches by themselves.
    return 3 * per_token * tokens.numel() / statistics.median(times[1:])


def peak_bytes(training: Training) -> int:
    """The most memory that tensors take in a step: those that are there before it, and what it adds to the process.

    The kernel counts the pages of the process. glibc gives freed ones back at once if ``MALLOC_MMAP_THRESHOLD_`` is in
    the environment, as :data:`GIVES_MEMORY_BACK` has it.
    """
    for _ in range(2):  # Finalizers of the training before, which run in the first, let go of more.
        gc.collect()
    storages = dict[int, int]()
    for each in gc.get_objects():
        if isinstance(each, Tensor):
            storage = (each.to_local() if isinstance(each, DTensor) else each).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    before = _pages("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # The peak starts again.
    training.step()
    return sum(storages.values()) + _pages("VmHWM") - before


def _pages(key: str) -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def table(flops: float, rows: Sequence[tuple[str, float, float, float, float]]) -> str:
    """In the order of the plan; places are those of the measured times."""
    by_time = sorted(measured for _, _, measured, _, _ in rows)
    lines = [f"{flops / 1e9:.1f} GFLOP/s per rank", "| split | s, plan | s | place | MB, plan | MB | plan / real |"]
    lines.append(f"|{' --- |' * 7}")
    for name, planned, measured, planned_bytes, measured_bytes in rows:
        place, megabytes = by_time.index(measured) + 1, f"{planned_bytes / 1e6:.0f} | {measured_bytes / 1e6:.0f}"
        ratio = planned_bytes / measured_bytes
        lines.append(f"| {name} | {planned:.3f} | {measured:.3f} | {place} | {megabytes} | {ratio:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
