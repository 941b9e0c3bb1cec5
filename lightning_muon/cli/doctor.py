"""``lightning-muon doctor``: what is installed here, whether ranks reach each other, and what will not work."""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon import __version__
from lightning_muon.cli.table import count, memory_of_host, table
from lightning_muon.comm.collectives import axis_group, start_all_to_all
from lightning_muon.compat.torch import cpu_multiplies_bfloat16_fast

_DESCRIPTION = """Say which versions, devices, backends and network interfaces there are, and what will not work, and
why. Under torchrun the ranks exchange known numbers on each axis of the mesh that they make, on CUDA if there is any.
Exits with 1 if something is broken, and with 0 if there are notes only."""
_PACKAGES = ("torch", "triton", "lightning", "pytorch-lightning", "accelerate", "transformers", "jsonargparse")
_SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "CUDA_DEVICE_MAX_CONNECTIONS")
_SETTINGS += ("TORCH_NCCL_HIGH_PRIORITY",)
_MIB = 64  # Of the tensor that is exchanged.
Rows = list[tuple[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description, about = _DESCRIPTION, "replicas among the ranks (default 1)"
    parser.add_argument("--replicate-size", type=count, default=1, metavar="R", help=about)


def run(arguments: argparse.Namespace) -> None:
    """Print what was found; exits with 1 if something is broken."""
    broken, notes, links = list[str](), list[str](), list[tuple[Any, ...]]()
    rows = [*_packages(broken, notes), *_devices(notes), *_network(broken)]
    if "RANK" not in os.environ:
        notes.append("no exchange was tried: torchrun --nproc-per-node N -m lightning_muon doctor lets N ranks try one")
    else:
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group()
            links = exchange("cuda" if torch.cuda.is_available() else "cpu", arguments.replicate_size)
            dist.destroy_process_group()
        except Exception as error:
            broken.append(f"the exchange of {os.environ['WORLD_SIZE']} ranks failed: {error}")
        if os.environ["RANK"] != "0":
            return
    for axis, *_, is_right in links:
        if not is_right:
            broken.append(f"the axis {axis} gave wrong numbers: check the network, and the memory of hosts")
    console = Console(file=sys.stdout, highlight=False, markup=False)
    console.print(table({"what": "", "found": ""}, rows))
    if links:
        columns = {"axis": "", "ranks": "d", f"ms for {_MIB} MiB": ",.1f"}
        console.print(table(columns, [row[:-1] for row in links]))
    for title, lines in (("broken", broken), ("to know", notes)):
        for line in lines:
            console.print(f"{title}: {line}", soft_wrap=True)
    if broken:
        sys.exit(1)
    console.print("Nothing is broken.")


def _packages(broken: list[str], notes: list[str]) -> Rows:
    """Python and the packages that matter, beside the versions that are supported."""
    rows = [("lightning-muon", __version__), ("python", f"{platform.python_version()}, {platform.platform()}")]
    try:
        required = requires("lightning-muon") or ()
    except PackageNotFoundError:
        required = ()
        notes.append("lightning-muon is not installed, only found in a folder: no versions were compared")
    supported = {each.name: each.specifier for each in map(Requirement, required)}
    for name in _PACKAGES:
        try:
            found = version(name)
        except PackageNotFoundError:
            rows.append((name, "not installed"))
            continue
        if name in supported and not supported[name].contains(found, prereleases=True):
            broken.append(f"{name} {found} is installed; this package is tested with {supported[name]}")
        rows.append((name, found))
    return rows


def _devices(notes: list[str]) -> Rows:
    """Processors, cards and memory, and the dtypes in which they run Newton-Schulz."""
    dtype = "bfloat16" if cpu_multiplies_bfloat16_fast() else "float32"
    rows = [("CPU", f"{os.cpu_count()} cores, {memory_of_host() / 2**30:.0f} GiB, Newton-Schulz in {dtype}")]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{card.name}, {card.total_memory / 2**30:.0f} GiB, Newton-Schulz in bfloat16"))
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no device"
        notes.append(f"no CUDA: {why}; everything runs on CPUs over gloo")
    elif os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        notes.append(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lets all streams of a card share one queue: gathers and transfers wait "
            "for products in place of running behind them; unset it"
        )
    return rows


def _network(broken: list[str]) -> Rows:
    """Backends of torch.distributed, network interfaces, and the address by which other hosts reach this one."""
    if torch.cuda.is_available() and not dist.is_nccl_available():
        broken.append("there is CUDA, but no NCCL: ranks on cards cannot talk; install a torch with NCCL")
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "no address, which gloo needs: set GLOO_SOCKET_IFNAME to an interface"
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    rows = [("backends", "gloo, nccl" if dist.is_nccl_available() else "gloo"), ("interfaces", interfaces)]
    return [*rows, ("host", f"{host}, {address}"), *((key, os.environ[key]) for key in _SETTINGS if key in os.environ)]


def exchange(device_type: str, replicate_size: int) -> list[tuple[Any, ...]]:
    """Exchange known numbers on each axis: (axis, ranks, milliseconds, whether all ranks got the right ones).

    Collective over the default process group.
    """
    num_shards, rest = divmod(dist.get_world_size(), replicate_size)
    if rest:
        raise ValueError(f"{dist.get_world_size()} ranks are no multiple of --replicate-size {replicate_size}")
    mesh = init_device_mesh(device_type, (replicate_size, num_shards), mesh_dim_names=("replicate", "shard"))
    found: list[tuple[Any, ...]] = []
    for axis, name in ((1, "shard"), (0, "replicate")):
        group = axis_group(mesh, (axis,))
        if group.size == 1:
            continue
        numbers = torch.arange(1.0, group.size + 1, device=device_type)
        sizes = [_MIB * 2**18 // group.size] * group.size
        sent = numbers[group.rank].repeat(sum(sizes))
        got, milliseconds = sent, 0.0
        for _ in range(2):  # The first exchange connects.
            got = sent.clone()
            dist.barrier(group.group)
            started = time.perf_counter()
            for work in start_all_to_all(sent, sizes, got, sizes, group):
                work.wait()
            got[-1].item()  # Waits for a card.
            milliseconds = 1e3 * (time.perf_counter() - started)
        is_right = torch.tensor(int(torch.equal(got, numbers.repeat_interleave(sizes[0]))), device=device_type)
        dist.all_reduce(is_right, dist.ReduceOp.MIN)
        found.append((name, group.size, milliseconds, bool(is_right)))
    return found
