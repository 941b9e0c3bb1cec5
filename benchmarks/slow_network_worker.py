"""What each rank of ``slow_network.py`` does; torchrun starts it in two network namespaces.

torchrun ... benchmarks/slow_network_worker.py JOB_FILE RESULT_FILE
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from namespaces import sent_bytes, set_rate
from slow_network_contenders import CONTENDERS, Contender, Job, make_batch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_muon.compat.torch import let_gloo_finish_at_exit

NUM_NODES = 2
NUM_HELD_OUT = 8


def main() -> None:
    job_file, result_file = sys.argv[1:]
    job = Job(**json.loads(Path(job_file).read_text()))
    torch.set_num_threads(1)
    # FSDP2 warns of T5's blocks, FSDP1 of groups of one rank, torch of names that others call.
    warnings.simplefilter("ignore")
    let_gloo_finish_at_exit()
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    mesh = init_device_mesh("cpu", (NUM_NODES, job.ranks_per_node), mesh_dim_names=("replicate", "shard"))
    result = measure(job, mesh)
    if dist.get_rank() == 0:
        Path(result_file).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure(job: Job, mesh: DeviceMesh) -> dict[str, Any]:
    """Loss for each learning rate, then seconds and bytes for each rate with the best one.

    Collective over all ranks; every rank must call it.
    """
    make = CONTENDERS[job.contender]
    losses = [loss_after(make(mesh, lr, job), job) for lr in job.lrs] if job.loss_steps else []
    finite = [loss if math.isfinite(loss) else math.inf for loss in losses]
    best = finite.index(min(finite)) if finite else 0
    contender = make(mesh, job.lrs[best], job)
    rows = [measure_rate(contender, job, rate) for rate in job.rates]
    return {"lr": job.lrs[best], "loss": losses[best] if losses else None, "losses": losses, "rates": rows}


def loss_after(contender: Contender, job: Job) -> float:
    """Mean loss of held-out batches after the steps of a trial; without a limit of the rate."""
    set_rate_of_node(None)
    for batch in batches(job, seed=1, count=job.loss_steps):
        contender.step(batch)
    contender.optimizer.zero_grad()
    with torch.no_grad():
        loss = sum(contender.net(**batch).loss for batch in batches(job, seed=2, count=NUM_HELD_OUT)) / NUM_HELD_OUT
    dist.all_reduce(loss)
    return (loss / dist.get_world_size()).item()


def measure_rate(contender: Contender, job: Job, rate: float | None) -> dict[str, float]:
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


def time_steps(contender: Contender, job: Job, count: int) -> list[float]:
    seconds = []
    for batch in batches(job, seed=3, count=count):
        started = time.perf_counter()
        contender.step(batch)
        seconds.append(time.perf_counter() - started)
    return seconds


def batches(job: Job, *, seed: int, count: int) -> list[dict[str, torch.Tensor]]:
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
