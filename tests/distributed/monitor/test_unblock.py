"""Collectives that cannot end are broken off."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_muon.monitor.watchdog import break_communication
from tests.support.processes import ProcessPool


def _wait_in_different_groups() -> tuple[str, float, bytes]:
    """Each rank waits in a collective of another group; a listening port that is kept goes on serving."""
    other = dist.new_group([0, 1])
    for group in (None, other):
        dist.all_reduce(torch.ones(1), group=group)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = server.accept()
        threading.Timer(0.3, break_communication, args=[{port}]).start()
        start = time.monotonic()
        try:
            dist.all_reduce(torch.ones(1), group=other if dist.get_rank() else None)
        except RuntimeError as error:
            message = str(error)
        took = time.monotonic() - start
        served.sendall(b"alive")
        received = client.recv(5)
        served.close()
        client.close()
    return message, took, received


def test_ranks_that_wait_for_each_other_are_freed(gloo: ProcessPool) -> None:
    for message, took, received in gloo.run_fresh(_wait_in_different_groups, world_size=2, timeout=40.0):
        assert "onnection" in message
        assert 0.2 < took < 5
        assert received == b"alive"


def test_without_process_groups_nothing_is_broken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        served, _ = server.accept()
        break_communication({server.getsockname()[1]})
        served.sendall(b"alive")
        assert client.recv(5) == b"alive"
        break_communication()
        with pytest.raises(OSError):
            served.sendall(b"x")
        served.close()
        client.close()
