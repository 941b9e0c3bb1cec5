"""Ends communication that cannot end by itself, so that the waiting thread gets an exception."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, suppress

import torch.distributed as dist

from lightning_muon.compat.torch import process_groups


def break_communication(keep_ports: Collection[int] = ()) -> None:
    """Make every collective that this process waits in raise ``RuntimeError``, here and on its peers; local.

    NCCL communicators are aborted. gloo ignores ``abort`` and ``shutdown`` (torch 2.11 to 2.13: the waiting thread
    sleeps on until its timeout), but sees closed connections; so those TCP connections are shut down that came in
    at a port on which this process listens. Each connection of gloo came in at one of its two ends. All process groups
    are unusable afterwards. Needs ``/proc`` for gloo.

    Args:
        keep_ports: Listening ports that are not gloo's, such as that of the store.
    """
    for group in process_groups():
        if dist.get_backend(group) != "gloo":
            # Some backends have no abort.
            with suppress(RuntimeError):
                group.abort()
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(one)) for one in _tcp_sockets()]
        listening = {one.getsockname()[1] for one in sockets if _listens(one)} - set(keep_ports)
        for one in sockets:
            if not _listens(one) and one.getsockname()[1] in listening:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of this process; the caller closes it."""
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except FileNotFoundError:
        return
    for descriptor in descriptors:
        try:
            copy = os.dup(descriptor)
        except OSError:
            continue
        try:
            found = socket.socket(fileno=copy)
        except OSError:  # No socket.
            os.close(copy)
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            yield found
        else:
            found.close()


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
