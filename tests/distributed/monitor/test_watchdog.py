"""Ranks that can never meet end together, with the reason."""

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_muon import ParallelMuon
from lightning_muon.compat.torch import default_store
from lightning_muon.monitor import watchdog as watchdog_module
from lightning_muon.monitor.processes import GlooConnections
from lightning_muon.monitor.watchdog import Watchdog
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import Sharding, make_mode
from tests.distributed.sharding.experts import inputs_of, sharded, watching
from tests.distributed.sharding.models import make_mesh
from tests.support.processes import ProcessPool, RanksFailedError

BOTH = ([0, 1], [0, 1])
# Less than the default, so that tests are short.
SOON = 1.0


def _train(
    shape: tuple[int, int],
    steps: Sequence[Sequence[Sequence[int]]],
    widths: Sequence[int] = (13, 11),
    *,
    log: bool = False,
    patience: float = SOON,
    sleep: float = 0.0,
) -> int:
    """Steps in which each rank chooses its experts; an error that comes after ten seconds is another error."""
    model, agreement = sharded(make_mesh(shape), ["Expert", "Layer"], widths)
    rank = dist.get_rank()
    with watching(agreement.call_log, patience=patience, interval=patience / 8):
        for chosen in steps:
            start = time.monotonic()
            try:
                if rank == 1:
                    time.sleep(sleep)
                loss = model(inputs_of(rank), chosen[rank]).square().mean()
                if log:
                    dist.all_reduce(loss.detach())
                loss.backward()
                agreement.finish_gradients()
            except RuntimeError:
                assert time.monotonic() - start < 10 - patience
                raise
    assert time.monotonic() - start < 10
    return len(steps)


@pytest.mark.parametrize(
    ("shape", "steps", "options"),
    [
        pytest.param((1, 2), [BOTH, ([0, 1], [0])], {"patience": 4.0, "widths": (13, 13)}, id="default patience"),
        pytest.param((1, 2), [([0], [1])], {}, id="units of different sizes"),
        pytest.param((1, 2), [([0], [0, 1])], {"log": True}, id="one of two in a collective of its own"),
        pytest.param((2, 2), [([0], [0], [0], [0, 1])], {}, id="one of four ranks runs one unit more"),
        pytest.param((4, 1), [([0], [0], [0, 1], [0])], {}, id="replicas only"),
    ],
)
def test_ranks_that_run_different_units_end_together(
    gloo: ProcessPool, shape: tuple[int, int], steps: Sequence[Sequence[Sequence[int]]], options: dict[str, Any]
) -> None:
    match = "experts" if "log" in options else r"run different units.*layers\.\d\.experts\.1"
    gloo.expect_error_on_all_ranks(
        _train, shape, steps, **options, match=match, exception=RuntimeError, world_size=len(steps[0])
    )


def test_a_slow_rank_is_waited_for(gloo: ProcessPool) -> None:
    assert gloo.run(_train, (1, 2), [BOTH, ([1], [1])], patience=0.5, sleep=0.9, world_size=2) == [2, 2]


def _run_forward_on_one_rank() -> None:
    """As a Trainer does: rank 0 samples between two steps, the others go on to their next collective."""
    model, agreement = sharded(make_mesh((1, 2)), ["Layer"])
    with watching(agreement.call_log, patience=SOON, interval=SOON / 8):
        if dist.get_rank() == 0:
            model.unshard()
        else:
            dist.all_reduce(torch.ones(1), group=agreement.call_log.everyone.group)


def test_a_forward_on_one_rank_is_named_with_its_line(gloo: ProcessPool) -> None:
    match = r"rank 0 is in a forward pass that rank 1 does not make.* Rank 0: .* root Mixture, \S+test_watchdog.py:\d+ "
    failures = gloo.expect_error_on_all_ranks(
        _run_forward_on_one_rank, match=match, exception=RuntimeError, world_size=2
    )
    assert {failure.message for failure in failures.values()} == {failures[0].message}


def _wait_until_told_to_end() -> tuple[str, list[str]]:
    """Wait where nothing proves that nobody comes; SIGTERM has a handler, as in a Trainer."""
    _, agreement = sharded(make_mesh((1, 2)), ["Layer"])
    records: list[logging.LogRecord] = []
    watchdog_module._log.addFilter(records.append)  # type: ignore[arg-type]
    watchdog_module._SECONDS_TO_WARN = 1.5
    signal.signal(signal.SIGTERM, lambda *_: None)
    threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(RuntimeError) as raised, watching(agreement.call_log, patience=SOON, interval=SOON / 8):
        dist.recv(torch.ones(1), src=1 - dist.get_rank())
    return str(raised.value), [record.getMessage() for record in records]


def test_ranks_that_wait_say_where_and_end_by_sigterm(gloo: ProcessPool) -> None:
    for rank, (error, warnings) in enumerate(gloo.run_fresh(_wait_until_told_to_end, world_size=2, timeout=30.0)):
        assert "was told to end by a signal, and all ranks wait" in error
        assert len(warnings) == 1
        assert f"rank {rank} has stood in one place for 1 s: waits in recv, " in warnings[0]
        assert "test_watchdog.py:" in warnings[0]


def _die_on_one_rank() -> None:
    model, agreement = sharded(make_mesh((1, 2)), ["Layer"])
    watchdog = Watchdog(agreement.call_log, patience=0.5, interval=0.2)
    watchdog.start()
    with watchdog.explaining():
        model(inputs_of(0), [0]).sum().backward()
        if dist.get_rank() == 1:
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        model.layers[1](inputs_of(0), [0])  # In an order that is new, so in the barrier.


def _train_while_a_rank_is_stopped(
    mode_name: Sharding, seconds: float | None, *, silence: timedelta | None = None, limit: float = 1800.0
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5))
    mode = make_mode(mode_name, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), ModeOptions())
    mode.prepare(model)
    mode.watch(model)
    optimizer = ParallelMuon(model, lr=1e-2)
    mode.attach(model, [optimizer])
    assert mode.call_log is not None
    watchdog = Watchdog(mode.call_log, patience=0.5, interval=0.1, silence=silence)
    default_store().set_timeout(timedelta(seconds=limit))
    watchdog.start()
    try:
        for step in range(3):
            if dist.get_rank() == 1 and step == 1:  # As a debugger or a scheduler does.
                if seconds is not None:
                    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            with watchdog.explaining():
                model(torch.ones(3, 7)).square().mean().backward()
                mode.finish_gradients()
                optimizer.step()
                mode.end_step()
                mode.finish_parameters()
                optimizer.zero_grad()
    finally:
        watchdog.close()


@pytest.mark.parametrize(("mode", "silence", "limit"), [("fsdp", None, 3.0), ("ddp", timedelta(seconds=2), 1800.0)])
def test_a_stopped_rank_is_waited_for_until_the_limit(
    gloo: ProcessPool, mode: Sharding, silence: timedelta | None, limit: float
) -> None:
    with pytest.raises(RanksFailedError, match=r"rank 1 has given no sign of life for 2 s"):
        gloo.run_fresh(
            _train_while_a_rank_is_stopped, mode, None,
            silence=silence, limit=limit, world_size=2, timeout=40.0, grace=1.0,
        )  # fmt: skip


def test_a_rank_that_is_silent_for_less_is_no_dead_one(gloo: ProcessPool) -> None:
    gloo.run_fresh(_train_while_a_rank_is_stopped, "fsdp", 2.0, world_size=2, timeout=40.0)


def test_a_rank_that_waits_at_a_barrier_for_a_dead_one_ends(gloo: ProcessPool) -> None:
    with pytest.raises(RanksFailedError) as raised:
        gloo.run_fresh(_die_on_one_rank, world_size=2, timeout=40.0, grace=8.0)
    assert "rank 1 has died" in raised.value.failures[0].message


def _come_too_late() -> str:
    model, agreement = sharded(make_mesh((1, 2)), ["Layer"])
    default_store().set_timeout(timedelta(seconds=1.0))
    watchdog = Watchdog(agreement.call_log, patience=0.4, interval=0.2, silence=timedelta(seconds=1.0))
    watchdog.start()
    default_store().set_timeout(timedelta(seconds=30.0))
    try:
        with watchdog.explaining():
            if dist.get_rank() == 1:
                time.sleep(2.5)
            model(inputs_of(0), [0])
    except RuntimeError as error:
        return str(error)
    return ""


def test_the_barrier_times_out_and_names_who_is_missing(gloo: ProcessPool) -> None:
    waiting, late = gloo.run_fresh(_come_too_late, world_size=2, timeout=40.0)
    assert "has waited 1 s" in waiting and "missing: 1." in waiting
    assert "has waited 1 s" in late and "rank 0" in late


def _fail_outside() -> tuple[str, float]:
    model, agreement = sharded(make_mesh((1, 3)), ["Layer"])
    watchdog = Watchdog(agreement.call_log, patience=0.8, interval=0.2)
    watchdog.start()
    start = time.monotonic()
    try:
        if dist.get_rank() == 1:
            with suppress(KeyboardInterrupt), watchdog.explaining():
                raise KeyboardInterrupt("by hand")
            watchdog.failed(ValueError("the second"))
            time.sleep(2.0)  # Otherwise closed connections would tell the others.
        else:
            with watchdog.explaining():
                model(inputs_of(0), [0])
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    finally:
        watchdog.close()
    return "", time.monotonic() - start


def test_ranks_that_wait_for_a_failed_one_learn_why(gloo: ProcessPool) -> None:
    first, failed, last = gloo.run_fresh(_fail_outside, world_size=3, timeout=40.0)
    assert failed[0] == ""
    for message, seconds in (first, last):
        assert "rank 1 has failed: KeyboardInterrupt: by hand" in message
        assert seconds < 4


def _wait_where_nothing_can_be_closed(seconds: float) -> None:
    """Rank 1 fails, and rank 0 waits for it over connections that cannot be closed from here."""
    _, agreement = sharded(make_mesh((1, 2)), ["Layer"])
    GlooConnections.abort = lambda self: None  # type: ignore[method-assign]
    default_store().set_timeout(timedelta(seconds=seconds))
    watchdog = Watchdog(agreement.call_log, patience=0.4, interval=0.1, silence=timedelta(seconds=60))
    watchdog.start()
    dist.barrier()
    with watchdog.explaining():
        if dist.get_rank() == 1:
            watchdog.failed(ValueError("too few rows"))
            time.sleep(seconds - 0.5)
            os.write(1, b"at the timeout")
            time.sleep(10.0)
        dist.recv(torch.ones(1), src=1)


def test_a_process_is_ended_after_the_timeout_only(gloo: ProcessPool) -> None:
    with pytest.raises(
        RanksFailedError, match=r"rank 0 died, exit code 1 [\s\S]*too few rows[\s\S]*outlives"
    ) as raised:
        gloo.run_fresh(_wait_where_nothing_can_be_closed, 3.0, world_size=2, timeout=40.0, grace=0.2)
    assert "at the timeout" in str(raised.value)


def _fail_and_end() -> tuple[str, float]:
    """Rank 1 ends right after it has failed."""
    model, agreement = sharded(make_mesh((1, 2)), ["Layer"])
    model(inputs_of(0), [0])
    watchdog = Watchdog(agreement.call_log, patience=6.0)
    watchdog.start()
    dist.barrier()
    if dist.get_rank() == 1:
        watchdog.failed(OSError("file 4"))
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        with watchdog.explaining():
            dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", -1.0


def test_a_rank_whose_connection_is_closed_learns_why_at_once(gloo: ProcessPool) -> None:
    with pytest.raises(RanksFailedError) as raised:
        gloo.run_fresh(_fail_and_end, world_size=2, timeout=40.0)
    message, seconds = raised.value.results[0]
    assert message == "rank 1 has failed: OSError: file 4"
    assert seconds < 3


def _fail_under_a_launcher() -> float:
    """Rank 1 fails while rank 0 computes, which the launcher kills as soon as rank 1 ends."""
    _, agreement = sharded(make_mesh((1, 2)), ["Layer"])
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    watchdog = Watchdog(agreement.call_log)
    watchdog.start()
    if dist.get_rank() == 0:
        time.sleep(20.0)
    start = time.monotonic()
    watchdog.failed(OSError("file 4"))
    os.kill(pids[0], signal.SIGKILL)
    return time.monotonic() - start


def test_a_failed_rank_ends_once_the_others_have_logged_why(gloo: ProcessPool) -> None:
    with pytest.raises(RanksFailedError, match="rank 0 learns: rank 1 has failed: OSError: file 4") as raised:
        gloo.run_fresh(_fail_under_a_launcher, world_size=2, timeout=40.0)
    assert raised.value.results[1] < 2.0


def _fail_in_collectives() -> None:
    """Each rank fails in torch.distributed; nobody can say why."""
    _, agreement = sharded(make_mesh((1, 2)), ["Layer"])
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="BXOR"), watching(agreement.call_log, patience=9.0):
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR)
    assert time.monotonic() - start < 5


def test_ranks_that_all_fail_do_not_wait_for_a_cause(gloo: ProcessPool) -> None:
    gloo.run_fresh(_fail_in_collectives, world_size=2)


def _fail_together() -> list[float]:
    """The same error everywhere, a checkpoint that takes longer than the patience, and a second run."""
    model, agreement = sharded(make_mesh((1, 2)), ["Layer"])
    sums = []
    for run in range(2):
        try:
            with watching(agreement.call_log, patience=0.5, interval=0.1) as watchdog:
                model(inputs_of(0), [run]).sum().backward()
                agreement.finish_gradients()
                try:
                    with watchdog.explaining():
                        raise ValueError("the gradient is NaN")
                finally:
                    if dist.get_rank() == 1:
                        time.sleep(1.2)
                    total = torch.ones(())
                    dist.all_reduce(total)
                    sums.append(total.item())
        except ValueError:
            continue
    return sums


def test_ranks_that_fail_together_may_train_again(gloo: ProcessPool) -> None:
    assert gloo.run(_fail_together, world_size=2) == [[2.0, 2.0]] * 2


def _connect_across_ranks(server: socket.socket) -> list[socket.socket]:
    """Both ends of a connection of the program's own to the other rank, as one is made by a debugger or a service."""
    ports: list[Any] = [None, None]
    dist.all_gather_object(ports, server.getsockname()[1])
    client = socket.create_connection(("127.0.0.1", ports[1 - dist.get_rank()]))
    return [client, server.accept()[0]]


def _wait_in_different_groups() -> tuple[str, float, int]:
    """Each rank waits in a collective of another group; what came over connections of the program's own afterwards."""
    server = socket.create_server(("127.0.0.1", 0))
    own = _connect_across_ranks(server)
    connections = GlooConnections(default_store().clone())
    connections.record()
    other = dist.new_group([0, 1])
    for group in (None, other):
        dist.all_reduce(torch.ones(1), group=group)
    own += _connect_across_ranks(server)
    connections.record()
    threading.Timer(0.3, connections.abort).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        dist.all_reduce(torch.ones(1), group=other if dist.get_rank() else None)
    took = time.monotonic() - start
    for end in own:
        end.sendall(b"alive")
    received = sum(end.recv(5) == b"alive" for end in own)
    own += [socket.create_connection(server.getsockname())]
    pipes = [os.pipe() for _ in range(20)]
    num_open = len(os.listdir("/proc/self/fd"))
    connections.abort()
    assert len(os.listdir("/proc/self/fd")) < num_open + len(pipes)  # Other threads open and close some, too.
    return str(raised.value), took, received


def test_only_the_connections_of_groups_are_closed(gloo: ProcessPool) -> None:
    for message, took, received in gloo.run_fresh(_wait_in_different_groups, world_size=2, timeout=40.0):
        assert "onnection" in message
        assert 0.2 < took < 5 and received == 4
