"""The child side of :mod:`tests.support.processes`: one process, one rank, one call after the other."""

from __future__ import annotations

import datetime
import faulthandler
import functools
import multiprocessing
import os
import pickle
import random
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one rank has to do in one call."""

    # Pickle of (function, args, kwargs); a test module that cannot be imported is reported like any other failure.
    payload: bytes
    rank: int
    world_size: int
    timeout: float
    store_path: str
    port: int
    environ: dict[str, str]
    sys_path: list[str]


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The exception of one rank, as text: exceptions themselves are not always picklable."""

    type_names: tuple[str, ...]  # The class and then every base class.
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RankFailure:
        names = tuple(qualified_name(base) for base in type(error).__mro__)
        text = "".join(traceback.format_exception(error))
        return cls(type_names=names, message=str(error), traceback=text)


def qualified_name(cls: type) -> str:
    """``module.Class``, by which exception types are compared across processes."""
    return f"{cls.__module__}.{cls.__qualname__}"


# Modules that garbage collection skips, and those that were searched for caches.
_FROZEN: set[str] = set()
_SEARCHED: set[str] = set()
_CACHES: list[Any] = []


def serve(connection: Connection, log_path: str) -> None:
    """Answer calls until the other end of ``connection`` closes.

    After each answer the process group stays open until the parent says that every rank has answered: a rank that
    leaves early would show up on the others as a lost connection and hide the first error.
    """
    os.setpgid(0, 0)
    redirect_output(log_path)
    faulthandler.enable()  # SIGABRT prints the stacks of all threads, whatever handlers a Trainer has set.
    import torch

    torch.set_num_threads(1)
    # Processes of a DataLoader start as in any program; a fork server would have to import torch first.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    environ, directory = dict(os.environ), Path.cwd()
    while True:
        try:
            call: Call = pickle.loads(connection.recv_bytes())
            # A worker whose parent was killed must not outlive the time limit of the call.
            faulthandler.dump_traceback_later(call.timeout + 60.0, exit=True)
            connection.send_bytes(pickle.dumps(_answer(call)))
            connection.recv_bytes()
            _leave(environ, directory)
            faulthandler.cancel_dump_traceback_later()
            connection.send_bytes(b"idle")
        except (EOFError, BrokenPipeError, ConnectionResetError):
            os._exit(0)


def _answer(call: Call) -> bytes | RankFailure:
    """Run the call; the pickled result, or what went wrong."""
    try:
        _join(call)
        function, args, kwargs = pickle.loads(call.payload)
        return pickle.dumps(function(*args, **kwargs))
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return RankFailure.of(error)


def _join(call: Call) -> None:
    """Set the environment of a launcher and start the default process group."""
    import torch.distributed as dist

    sys.path[:] = call.sys_path
    os.environ.clear()
    os.environ.update(call.environ)
    rank, size = str(call.rank), str(call.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, NODE_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(call.port), OMP_NUM_THREADS="1")
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(call.store_path, call.world_size),
        rank=call.rank,
        world_size=call.world_size,
        # Below the limit of the call, so that a hanging collective ends in a Python traceback.
        timeout=datetime.timedelta(seconds=0.75 * call.timeout),
    )


def _leave(environ: dict[str, str], directory: Path) -> None:
    """End the process group and undo what a test function may leave behind."""
    import gc

    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_mesh_caches()
    # Threads of gloo spin as long as something refers to their groups.
    gc.collect()
    if not sys.modules.keys() <= _FROZEN:
        # Imported modules stay; to look through them after every call would take longer than most calls.
        gc.freeze()
        _FROZEN.update(sys.modules)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(directory)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)


def _clear_mesh_caches() -> None:
    """Forget every cached object of torch.distributed that may hold a device mesh.

    Meshes of the same layout compare equal, so that a cache would hand a later call the mesh, and with it the process
    groups, of an earlier one.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    names = sys.modules.keys() - _SEARCHED
    _SEARCHED.update(names)
    _CACHES.extend(_torch_distributed_caches(names))
    for cache in _CACHES:
        cache.cache_clear()
    planner = sys.modules.get("torch.distributed.tensor._redistribute")
    if planner is not None:
        planner.clear_redistribute_planner_cache()
    groups = sys.modules.get("lightning_muon.comm.collectives")
    if groups is not None:
        groups._made()  # Lets go those of a destroyed world.


def _torch_distributed_caches(names: Iterable[str]) -> Iterator[Any]:
    """Every ``functools.cache`` of torch.distributed in these modules, and in their classes."""
    for name in names:
        if not name.startswith("torch.distributed"):
            continue
        for value in list(vars(sys.modules[name]).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                yield value
            elif isinstance(value, type) and value.__module__ == name:
                members = (getattr(member, "__func__", member) for member in vars(value).values())
                yield from (member for member in members if isinstance(member, functools._lru_cache_wrapper))


def redirect_output(log_path: str) -> None:
    """Send stdout and stderr, those of C++ included, to the log that the parent quotes when a call fails."""
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
