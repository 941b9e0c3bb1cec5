"""Runs a function on several ranks, and makes optimizers there."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, empty

from lightning_muon import ParallelMuon
from lightning_muon.compat.torch import let_gloo_finish_at_exit
from lightning_muon.params.shapes import ParameterShape

_TIMEOUT = timedelta(minutes=10)


def run_on_ranks(function: Callable[..., Any], *args: Any, num_ranks: int) -> Any:
    """Call ``function(*args)`` on ``num_ranks`` ranks of a default process group, and return what rank 0 returns.

    Under a launcher that sets ``RANK`` and ``WORLD_SIZE`` (torchrun) every rank must call it with the same arguments,
    and each gets its own result. Otherwise gloo processes are started on this machine, and share its cores; then
    everything must be picklable.
    """
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_run_spawned, args=(num_ranks, folder, function, args), nprocs=num_ranks)
            return pickle.loads(Path(folder, "result").read_bytes())
    if int(os.environ["WORLD_SIZE"]) != num_ranks:
        raise ValueError(f"torchrun has started {os.environ['WORLD_SIZE']} ranks, and {num_ranks} were asked for")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=_TIMEOUT)
    return function(*args)


def _run_spawned(rank: int, num_ranks: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    let_gloo_finish_at_exit()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=_TIMEOUT
    )
    result = function(*args)
    dist.barrier()
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def this_device() -> torch.device:
    """CUDA device of this rank if the default process group uses NCCL, else the CPU."""
    if dist.get_backend() != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def mesh_of(num_replicas: int, device_type: str) -> DeviceMesh:
    """Replicas x shards of all ranks. Collective; every rank must call it."""
    shape = num_replicas, dist.get_world_size() // num_replicas
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def sharded_muon(shapes: Sequence[ParameterShape], num_replicas: int, device_type: str, **options: Any) -> ParallelMuon:
    """ParallelMuon on random weights, sharded as by FSDP2, with gradients. Collective; every rank must call it."""
    mesh = mesh_of(num_replicas, device_type)
    torch.manual_seed(mesh.get_local_rank("shard"))  # Replicas hold equal weights.
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {"muon": [], "adamw": []}
    trained = [each for each in shapes if not each.frozen]
    for each in trained:
        placements = (Replicate(), Shard(each.shard_dim) if each.shape else Replicate())
        weight = nn.Parameter(empty(each.shape, device_mesh=mesh, placements=placements))
        weight.detach().to_local().normal_()
        groups["adamw" if each.kind == "elementwise" else "muon"].append((each.name, weight))
        new_gradient_(weight)
    parts = [{each.name: each.splits for each in trained if each.splits and each.split_dim == dim} for dim in (0, 1)]
    given = [{"params": params, "algorithm": algorithm} for algorithm, params in groups.items() if params]
    return ParallelMuon(given, fused=parts[0], fused_inputs=parts[1], **options)


def new_gradient_(weight: nn.Parameter) -> None:
    """Give a DTensor another random gradient; local."""
    weight.grad = torch.empty_like(weight)
    weight.grad.to_local().normal_()
