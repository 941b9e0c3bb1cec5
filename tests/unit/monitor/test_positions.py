"""What positions of ranks prove, and whether a process is gone."""

import gc
import os
import re
import signal
import subprocess
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_muon.monitor.processes import describe_process, is_gone, standing_place, waiting_place
from lightning_muon.monitor.watchdog import Position, find_mismatch
from lightning_muon.sharding.guards import CallLog, Calls

A, B, A_BACKWARD = 0, 2, 1
END, LEFT = -2, -3


@pytest.fixture
def call_log(monkeypatch: pytest.MonkeyPatch) -> CallLog:
    """Two units, ``0`` and ``1``."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for child in model:
            fully_shard(child, mesh=mesh)
        return CallLog(model, mesh)
    finally:
        dist.destroy_process_group()


def at(calls: list[int], group: str | None = None, counts: Any = None, *, skipped: int = 0, **more: Any) -> Position:
    fields: dict[str, Any] = {"step": 3, "mesh": 0, "beat": 2, "news": "", **more}
    return Position(**fields, calls=Calls(skipped + len(calls), calls), group=group, counts=counts or {})


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        pytest.param(at([A]), at([B]), r"rank 0 runs '0'.*rank 1 runs '1'", id="units"),
        pytest.param(at([A, A_BACKWARD]), at([A, B]), "backward pass of '0'", id="directions"),
        pytest.param(at([A, B]), at([A, END]), "rank 1 ends the backward passes", id="end"),
        pytest.param(at([A]), at([LEFT]), "rank 1 ends the run", id="left"),
        pytest.param(at([B, A], skipped=1), at([A, B, B]), "rank 0 runs '0'", id="skipped"),
        pytest.param(at([A], "x", {"x": 5}), at([], "x", {"x": 5}), "different places", id="one collective"),
        pytest.param(at([A], "x", {"x": 5, "y": 1}), at([], "y", {"x": 4, "y": 2}), "different places", id="crossed"),
        pytest.param(
            at([], "x", {"x": 5}, kind="all_gather", unit="'0'"),
            at([], "x", {"x": 5}, kind="broadcast", where="in broadcast, a.py:3"),
            r"rank 0 is in a forward pass that rank 1 does not make: .* '0'.* Rank 1: in broadcast, a.py:3\.",
            id="another collective",
        ),
        pytest.param(
            at([], "x", {"x": 5}, unit="'0'"),
            at([], counts={"x": 4}, beat=0, has_ended=True),
            "rank 0 is in a forward pass that rank 1",
            id="gathers from a rank that has left",
        ),
        # Slow ranks prove nothing.
        pytest.param(at([A], "x", {"x": 5}), at([]), None, id="the other computes"),
        pytest.param(at([A], "x", {"x": 5}), at([], "x", {"x": 4}), None, id="the other is late"),
        pytest.param(at([A], "x", {"x": 5}), at([A], "x", {"x": 5}), None, id="both wait for a third"),
        pytest.param(at([A]), at([B], step=4), None, id="another step"),
        pytest.param(at([A], "x", {"x": 5}), at([], "x", {"x": 5}, beat=1), None, id="just arrived"),
        pytest.param(at([A], "x", {"x": 5, "y": 1}), at([], "y", {"x": 5, "y": 2}), None, id="one has only to go on"),
        pytest.param(at([A], "x", {"x": 5}), at([], "y", {"x": 4, "y": 2}), None, id="a group of one of them"),
        pytest.param(at([], "x", {"x": 5}, kind="send"), at([], "x", {"x": 5}, kind="recv"), None, id="point to point"),
        pytest.param(at([A, B]), at([B], mesh=1), None, id="no rank in common"),
        pytest.param(at([B, A], skipped=9), at([A, B, B]), None, id="too far apart"),
    ],
)
def test_only_ranks_that_can_never_meet_are_named(
    call_log: CallLog, mine: Position, theirs: Position, words: str | None
) -> None:
    message = find_mismatch({0: mine, 1: theirs}, call_log)
    if words is None:
        assert message is None and find_mismatch({0: theirs, 1: mine}, call_log) is None
    else:
        assert message is not None and re.search(words, message), message


def test_a_look_at_a_thread_keeps_nothing_of_it_alive() -> None:
    """Not even until a garbage collection: it may hold the gradients and activations of a whole model."""

    def looked_at() -> weakref.ref[nn.Module]:
        module = nn.Module()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(waiting_place, threading.get_ident()).result()
            threads.submit(standing_place, threading.get_ident()).result()
        return weakref.ref(module)

    # The threshold alone: whether garbage is collected at all decides how frames are found.
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        assert looked_at()() is None
    finally:
        gc.set_threshold(*thresholds)


def test_a_killed_process_is_gone_before_its_parent_has_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    own = describe_process()
    assert not is_gone(own)
    assert is_gone(own + "1"), "another process of the same number"
    assert not is_gone(f"another/pid:[1] {os.getpid()} 3") and not is_gone(" 7 "), "not of this host"
    with monkeypatch.context() as patched, subprocess.Popen(["sleep", "60"]) as child:
        patched.setattr(os, "getpid", lambda: child.pid)
        description = describe_process()
        os.kill(child.pid, signal.SIGSTOP)
        assert not is_gone(description)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(description)
    assert is_gone(description)
