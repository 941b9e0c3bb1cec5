"""``lightning-muon doctor``: what is installed here, how fast ranks reach each other, and what will not work."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon import __version__
from lightning_muon.cli.table import count, memory_of_host, table
from lightning_muon.comm.collectives import start_all_reduce_sum, start_all_to_all
from lightning_muon.comm.groups import AxisGroup, axis_group
from lightning_muon.compat.torch import cpu_multiplies_bfloat16_fast
from lightning_muon.monitor.calibrate import run_on_ranks, this_device

_DESCRIPTION = """Say which versions, devices, backends and network interfaces there are, let ranks exchange known
numbers for a few seconds, on each axis of the mesh that they make, and list what will not work, and why. Starts gloo
processes on this machine; under torchrun the ranks are those that it has started, on CUDA if there is any. Exits with 1
if something is broken, and with 0 if there are notes only."""
_PACKAGES = ("torch", "triton", "lightning", "pytorch-lightning", "accelerate", "transformers", "jsonargparse")
_MESSAGE_BYTES = 8 * 2**20
# Ranks need descriptors for their connections, DataLoader workers and files; the default of Linux is 1024.
_LEAST_DESCRIPTORS, _LEAST_SHARED_BYTES = 1024, 2**30


@dataclass
class Findings:
    """Problems that were found: what cannot work, and what works less well than it could."""

    broken: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class MeasuredLink:
    """The measured exchange over one axis of the mesh."""

    axis: str
    num_ranks: int
    kind: str  # Kind of the collective.
    latency: float  # Seconds of a message of a few bytes.
    bandwidth: float  # Bytes per second that a rank sends.
    is_right: bool  # Whether all ranks got the numbers that were sent.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description, add = _DESCRIPTION, parser.add_argument
    add("--ranks", type=count, help="ranks of the self-test (default: those of torchrun, else 2)")
    add("--replicate-size", type=count, default=1, metavar="R", help="replicas among them (default 1)")
    add("--seconds", type=float, default=5.0, help="length of the self-test; 0 for none (default 5)")


def run(arguments: argparse.Namespace) -> None:
    """Print what was found; exits with 1 if something is broken."""
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    num_ranks = arguments.ranks or int(os.environ.get("WORLD_SIZE", "2"))
    if num_ranks % arguments.replicate_size:
        raise ValueError(f"{num_ranks} ranks are no multiple of --replicate-size {arguments.replicate_size}")
    findings, links = Findings(), list[MeasuredLink]()
    sections = [describe_packages(findings), describe_devices(findings), describe_network(findings)]
    if arguments.seconds > 0 and dist.is_available():
        try:
            links = run_on_ranks(
                partial(measure_links, arguments.replicate_size, arguments.seconds), num_ranks=num_ranks
            )
        except Exception as error:
            findings.broken.append(f"the self-test of {num_ranks} ranks failed: {error}")
    if is_launched and os.environ["RANK"] != "0":
        return
    findings.broken += [
        f"{each.kind} over the axis {each.axis} gave wrong numbers: check the network, and the memory of these hosts"
        for each in links
        if not each.is_right
    ]
    console = Console(file=sys.stdout, highlight=False)
    for title, rows in sections:
        console.print(_section(title, rows))
    if links:
        console.print("self-test", style="bold")
        console.print(_links_table(links))
    for title, lines in (("broken", findings.broken), ("to know", findings.notes)):
        for line in lines:
            console.print(f"{title}: {line}", soft_wrap=True, markup=False)
    if findings.broken:
        sys.exit(1)
    console.print("Nothing is broken.")


Rows = list[tuple[str, str]]


def describe_packages(findings: Findings) -> tuple[str, Rows]:
    """Python and the packages that matter, beside the versions that are supported."""
    rows = [("lightning-muon", __version__), ("python", f"{platform.python_version()}, {platform.platform()}")]
    supported = {each.name: each for each in map(Requirement, requires("lightning-muon") or ())}
    for name in _PACKAGES:
        try:
            found = version(name)
        except PackageNotFoundError:
            rows.append((name, "not installed"))
            continue
        wanted = supported.get(name)
        if wanted is not None and not wanted.specifier.contains(found, prereleases=True):
            findings.broken.append(f"{name} {found} is installed; this package is tested with {wanted.specifier}")
        rows.append((name, found))
    return "packages", rows


def describe_devices(findings: Findings) -> tuple[str, Rows]:
    """Processors, cards and memory, and the dtypes in which they run Newton-Schulz."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    dtype = "bfloat16" if cpu_multiplies_bfloat16_fast() else "float32"
    rows = [("CPU", f"{num_cores} cores, {memory_of_host() / 2**30:.0f} GiB, Newton-Schulz in {dtype}")]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{card.name}, {card.total_memory / 2**30:.0f} GiB, Newton-Schulz in bfloat16"))
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch finds no device"
        findings.notes.append(f"no CUDA: {why}; everything runs on CPUs over gloo")
    shared = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None
    if shared is not None:
        rows.append(("/dev/shm", f"{shared / 2**30:.1f} GiB"))
        if shared < _LEAST_SHARED_BYTES:
            findings.notes.append(
                "/dev/shm is small: DataLoader workers and NCCL share memory there; in a container set --shm-size"
            )
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    rows.append(("open files", str(descriptors)))
    if descriptors < _LEAST_DESCRIPTORS:
        findings.notes.append(f"{descriptors} open files per process are few: raise it with ulimit -n")
    return "devices", rows


def describe_network(findings: Findings) -> tuple[str, Rows]:
    """Backends of torch.distributed, network interfaces, and the address by which other hosts reach this one."""
    if not dist.is_available():
        findings.broken.append("this torch has no torch.distributed; install a build that has")
        return "network", []
    has_nccl = dist.is_nccl_available()
    backends = [name for name, is_there in (("gloo", dist.is_gloo_available()), ("nccl", has_nccl)) if is_there]
    if torch.cuda.is_available() and not has_nccl:
        findings.broken.append("there is CUDA, but no NCCL: ranks on cards cannot talk; install a torch with NCCL")
    rows = [("backends", ", ".join(backends)), ("interfaces", ", ".join(name for _, name in socket.if_nameindex()))]
    settings = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT")
    rows += [(key, os.environ[key]) for key in settings if key in os.environ]
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        findings.notes.append(
            f"the name of this host, {host}, has no address ({error}); gloo needs one: add it to /etc/hosts, or set "
            "GLOO_SOCKET_IFNAME to an interface"
        )
        return "network", [*rows, ("host", host)]
    if address.startswith("127."):
        findings.notes.append(
            f"{host} means {address}, which other hosts cannot reach; for several nodes set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the interface between them"
        )
    return "network", [*rows, ("host", f"{host}, {address}")]


def measure_links(replicate_size: int, seconds: float) -> list[MeasuredLink]:
    """Exchange known numbers on each axis. Collective over the default process group; every rank must call it."""
    device = this_device()
    shape = replicate_size, dist.get_world_size() // replicate_size
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    groups = [(name, axis_group(mesh, (axis,))) for axis, name in ((1, "shard"), (0, "replicate"))]
    groups = [(name, group) for name, group in groups if group.size > 1]
    kinds = {"all-to-all": _all_to_all, "all-reduce": _all_reduce}
    share = seconds / max(1, len(groups) * len(kinds) * 2)
    tests: list[MeasuredLink] = []
    for name, group in groups:
        for kind, exchange in kinds.items():
            latency, _, is_small_right = _timed(exchange, group, 64 * group.size, share, device)
            duration, num_bytes, is_right = _timed(exchange, group, _MESSAGE_BYTES, share, device)
            right = torch.tensor(int(is_small_right and is_right), device=device)
            dist.all_reduce(right, dist.ReduceOp.MIN)
            tests.append(MeasuredLink(name, group.size, kind, latency, num_bytes / duration, bool(right)))
    return tests


Exchange = Callable[[Tensor, AxisGroup], Tensor]


def _timed(
    exchange: Exchange, group: AxisGroup, num_bytes: int, seconds: float, device: torch.device
) -> tuple[float, int, bool]:
    """Seconds of one exchange, bytes that a rank sends, whether the numbers were right. Collective over ``group``."""
    sent = torch.full((num_bytes // 4 // group.size * group.size,), float(group.rank + 1), device=device)
    number, spent, is_right = 1, 0.0, True
    # The first exchange connects; the second one gives the number that fills the time, alike on all ranks.
    for attempt in range(3):
        dist.barrier(group.group)
        started = time.perf_counter()
        for _ in range(number):
            got = exchange(sent, group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent = (time.perf_counter() - started) / number
        # With either collective, the mean of what a rank gets is the mean of what all ranks sent.
        is_right = is_right and got.double().mean().item() == (group.size + 1) / 2
        if attempt == 1:
            slowest = torch.tensor(spent, device=device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group.group)
            number = max(1, min(1000, int(seconds / max(slowest.item(), 1e-6))))
    return spent, sent.nbytes * (group.size - 1) // group.size, is_right


def _all_to_all(sent: Tensor, group: AxisGroup) -> Tensor:
    """Each rank gets an equal part of what every rank sends. Collective over ``group``; every rank must call it."""
    got, splits = torch.empty_like(sent), [sent.numel() // group.size] * group.size
    for work in start_all_to_all(sent, splits, got, splits, group):
        work.wait()
    return got


def _all_reduce(sent: Tensor, group: AxisGroup) -> Tensor:
    """The mean over the ranks. Collective over ``group``; every rank must call it."""
    total = sent.clone()
    start_all_reduce_sum(total, group).wait()
    return total / group.size


def _section(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table


def _links_table(links: Sequence[MeasuredLink]) -> Table:
    columns = {"axis": "", "ranks": "d", "collective": "", "latency us": ".0f", "a rank sends GB/s": ".3g"}
    rows = [(each.axis, each.num_ranks, each.kind, 1e6 * each.latency, each.bandwidth / 1e9) for each in links]
    return table(columns, rows)
