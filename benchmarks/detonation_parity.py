"""Train the same weights with the same gradients by DeToNATION 0.5.2 and by FlexDeMo, and compare.

``python benchmarks/detonation_parity.py --detonation FOLDER`` installs it there, as ``slow_network.py`` does, and runs
two nodes of one process each. DeToNATION cuts parameters of two dimensions into blocks, and flat ones, which
is what FSDP1 shows it, into strips (``DCTTopK(strips=True)``). It multiplies gradients by the learning rate before they
enter the residual, so FlexDeMo is given such gradients. Values travel as fp32, as there. Where the merged update is
about zero, rounding decides on its sign.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lightning_muon
from benchmarks.slow_network import install

SHAPES = (
    (128, 192),
    (64, 64),
    (256, 64),
)  # Whole chunks of 64 only: the peer chooses other chunks where they do not fit.
STEPS, LR, TOP_K = 20, 0.01, 8


@dataclass(frozen=True)
class Job:
    """Which mode is compared, where the peer's code lies, and where the two processes meet."""

    strips: bool
    sign: bool
    folder: str
    store: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detonation", required=True, metavar="FOLDER", help="install it there, if it is not")
    folder = Path(parser.parse_args().detonation).resolve()
    install(folder)
    print("| strips | sign | largest difference | of the largest change of a weight | elements that differ |")
    print("| --- | --- | ---: | ---: | ---: |")
    for strips in (False, True):
        for sign in (False, True):
            print(_on_two_nodes(strips, sign, folder), flush=True)


def _on_two_nodes(strips: bool, sign: bool, folder: Path) -> str:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = context.Pipe(duplex=False)
        job = Job(strips, sign, str(folder), f"{directory}/store")
        ranks = [context.Process(target=_compare, args=(rank, job, theirs)) for rank in range(2)]
        for process in ranks:
            process.start()
        theirs.close()
        row: str = ours.recv()
        for process in ranks:
            process.join()
    return row


def _compare(rank: int, job: Job, result: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(job.store, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    # Zeros: the rounding of larger weights would hide differences.
    ours = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    theirs = [nn.Parameter(torch.zeros(math.prod(shape) if job.strips else shape)) for shape in SHAPES]
    replicator = lightning_muon.DCTTopK(chunk_size=64, top_k=TOP_K, strips=job.strips)
    options: Any = {"sign": job.sign, "value_format": "fp32"}
    optimizers = [
        lightning_muon.FlexDeMo(ours, LR, mesh=mesh, replicator=replicator, **options),
        _peer(theirs, mesh, job),
    ]
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        lr = LR * (1 - step / STEPS)  # The gradients inside the momenta had other learning rates.
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = lr
        for own, peer in zip(ours, theirs, strict=True):
            gradient = torch.randn(own.shape, generator=generator)
            own.grad, peer.grad = lr * gradient, gradient.view_as(peer)
        for optimizer in optimizers:
            optimizer.step()
    if rank == 0:
        result.send(_row(job, ours, theirs))
    dist.destroy_process_group()


def _peer(parameters: list[nn.Parameter], mesh: Any, job: Job) -> torch.optim.Optimizer:
    sys.path.append(job.folder)  # Last, so that it cannot hide anything else.
    from detonation import DeMoReplicator, DeToSGD

    with contextlib.redirect_stdout(io.StringIO()):  # It prints its chunks.
        return DeToSGD(
            parameters,
            lr=LR,
            detonation_sign=job.sign,
            replicator=DeMoReplicator(compression_topk=TOP_K),
            sharding_parallel_group=mesh.get_group("shard"),
            replication_parallel_group=mesh.get_group("replicate"),
        )


def _row(job: Job, *weights: list[nn.Parameter]) -> str:
    ours, theirs = (torch.cat([parameter.detach().flatten() for parameter in each]) for each in weights)
    difference, change = (ours - theirs).abs(), theirs.abs().max()
    share = (difference > 1e-4 * change).float().mean()
    return f"| {job.strips} | {job.sign} | {difference.max():.1e} | {difference.max() / change:.1e} | {share:.1e} |"


if __name__ == "__main__":
    main()
