"""Ranks that can never meet end together, with the reason in each log and an exit code."""

import gc
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_muon.compat.torch import default_store
from lightning_muon.monitor.processes import standing_place, waiting_place
from lightning_muon.sharding.guards import CallLog
from lightning_muon.sharding.modes import Sharding
from tests.distributed.sharding.experts import inputs_of, sharded, watching
from tests.distributed.sharding.training import Training, mesh_of
from tests.support.processes import ProcessPool, RanksFailedError

BOTH = ([0, 1], [0, 1])
# Less than the default, so that tests are short.
SOON = 1.0


def _train(
    shape: tuple[int, int],
    steps: Sequence[Sequence[Sequence[int]]],
    widths: Sequence[int] = (13, 13),
    *,
    log: bool = False,
    patience: float = SOON,
    sleep: float = 0.0,
) -> int:
    """Steps in which each rank chooses its experts."""
    model, mode = sharded(mesh_of(shape), ["Expert", "Layer"], widths)
    rank = dist.get_rank()
    with watching(mode.call_log, patience=patience, interval=patience / 8):
        for chosen in steps:
            if rank == 1:
                time.sleep(sleep)
            loss = model(inputs_of(rank), chosen[rank]).square().mean()
            if log:
                dist.all_reduce(loss.detach())
            loss.backward()
            mode.finish_gradients()
    return len(steps)


@pytest.mark.parametrize(
    ("shape", "steps", "options"),
    [
        pytest.param((1, 2), [BOTH, ([0], [1])], {"widths": (13, 40)}, id="units of different sizes"),
        pytest.param((1, 2), [([0], [0, 1])], {"log": True}, id="one of two in a collective of its own"),
        pytest.param((2, 2), [([0], [0], [0], [0, 1])], {}, id="one of four ranks runs one unit more"),
        pytest.param((4, 1), [([0], [0], [0, 1], [0])], {}, id="replicas only"),
    ],
)
def test_ranks_that_run_different_units_end_together(
    shape: tuple[int, int], steps: Sequence[Sequence[Sequence[int]]], options: dict[str, Any]
) -> None:
    world_size, start = len(steps[0]), time.monotonic()
    with pytest.raises(RanksFailedError, match=r"layers\.\d\.experts\.1") as raised:
        ProcessPool().run_fresh(_train, shape, steps, **options, world_size=world_size, timeout=40.0, grace=10.0)
    assert time.monotonic() - start < 30
    # Each ends by itself; gloo aborts a process that gets a message of another size.
    codes = raised.value.exit_codes
    assert set(codes.values()) <= {1, -signal.SIGABRT} and 1 in codes.values()
    assert len(codes) + len(raised.value.failures) == world_size


def test_a_slow_rank_is_waited_for(gloo: ProcessPool) -> None:
    assert gloo.run(_train, (1, 2), [BOTH, ([1], [1])], patience=0.5, sleep=0.9, world_size=2) == [2, 2]


def _forward_on_one_rank() -> None:
    """As a Trainer does: rank 0 samples between two steps, the other one goes on to its next collective."""
    model, mode = sharded(mesh_of((1, 2)), ["Layer"])
    with watching(mode.call_log, patience=SOON, interval=SOON / 8):
        if dist.get_rank() == 1:
            dist.broadcast(torch.ones(1), 0)
        else:
            model.unshard()


def _die_on_one_rank(*, is_beside_stranger: bool) -> None:
    """Maybe after somebody has written into the store of the watchdogs what they cannot read."""
    model, mode = sharded(mesh_of((1, 2)), ["Layer"])
    with watching(mode.call_log, patience=0.5, interval=0.2) as watchdog:
        model(inputs_of(0), [0]).sum().backward()
        if dist.get_rank() == 1:
            time.sleep(1.0)
            if is_beside_stranger:
                watchdog._common.set("reason", b"\xff\xfe")
                for rank, wrong in enumerate((b"[]", b'{"calls": 1}')):
                    watchdog._store.set(f"position{rank}", wrong)
            os.kill(os.getpid(), signal.SIGKILL)
        model.layers[1](inputs_of(0), [0])


def _train_while_a_rank_is_stopped(
    mode_name: Sharding, *, seconds: float | None = None, silence: timedelta | None = None, limit: float = 1800.0
) -> None:
    training = Training.start(mode_name, mesh_of((2,)))
    default_store().set_timeout(timedelta(seconds=limit))
    with watching(CallLog(training.net, training.mode.mesh), patience=0.5, interval=0.1, silence=silence):
        for step in range(3):
            if dist.get_rank() == 1 and step == 1:  # As a debugger or a scheduler does.
                if seconds is not None:
                    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            training.step(step)
        training.mode.finish_parameters()


_LINE = r"ends: rank 0 is in a forward pass that rank 1 does not make.* Rank 0: .* root Mixture, \S+dog.py:\d+ "
_DIED, _SILENT = "rank 0 ends: rank 1 has died", "rank 0 ends: rank 1 has given no sign of life for 2 s"
_PASSED_OVER = f"(?s)(?=.*in the store as reason)(?=.*in the store as position1).*{_DIED}"


@pytest.mark.parametrize(
    ("program", "arguments", "match", "exit_codes"),
    [
        (_forward_on_one_rank, {}, _LINE, {0: 1, 1: 1}),
        (_die_on_one_rank, {"is_beside_stranger": False}, _DIED, {0: 1, 1: -signal.SIGKILL}),
        (_die_on_one_rank, {"is_beside_stranger": True}, _PASSED_OVER, {0: 1, 1: -signal.SIGKILL}),
        (_train_while_a_rank_is_stopped, {"mode_name": "fsdp", "limit": 3.0}, _SILENT, {0: 1}),
        (_train_while_a_rank_is_stopped, {"mode_name": "ddp", "silence": timedelta(seconds=2)}, _SILENT, {0: 1}),
    ],
)
def test_ranks_that_wait_for_another_one_end_and_say_why(
    program: Any, arguments: dict[str, Any], match: str, exit_codes: dict[int, int]
) -> None:
    with pytest.raises(RanksFailedError, match=match) as raised:
        ProcessPool().run_fresh(program, **arguments, world_size=2, timeout=40.0, grace=8.0)
    assert raised.value.exit_codes == exit_codes


def test_a_rank_that_is_silent_for_less_is_no_dead_one(gloo: ProcessPool) -> None:
    gloo.run_fresh(_train_while_a_rank_is_stopped, "fsdp", seconds=2.0, world_size=2, timeout=40.0)


def _fail_outside(*, ends: bool) -> float:
    """Rank 1 fails; its process ends at once, so that connections are closed, or goes on for a while."""
    model, mode = sharded(mesh_of((1, 3)), ["Layer"])
    assert mode.call_log is not None
    with watching(mode.call_log, patience=6.0 if ends else 0.8, interval=0.2) as watchdog:
        dist.barrier()
        if dist.get_rank() == 1:
            start = time.monotonic()
            watchdog.failed(KeyboardInterrupt("by hand"))
            watchdog.failed(ValueError("the second"))
            taken = time.monotonic() - start
            if ends:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3.0)
            return taken
        model(inputs_of(0), [0])
    return 0.0


@pytest.mark.parametrize("ends", [False, True])
def test_ranks_that_wait_for_a_failed_one_learn_why_and_end(ends: bool) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError) as raised:
        ProcessPool().run_fresh(_fail_outside, ends=ends, world_size=3, timeout=40.0)
    for rank in (0, 2):
        for what in ("learns", "ends"):
            assert f"rank {rank} {what}: rank 1 has failed: KeyboardInterrupt: by hand" in str(raised.value)
    assert raised.value.exit_codes == {0: 1, 2: 1} | ({1: -signal.SIGKILL} if ends else {})
    assert ends or raised.value.results[1] < 2.0, "it has waited for the others to learn, and no longer"
    assert time.monotonic() - start < 25


def _fail_in_collectives() -> None:
    """Each rank fails in torch.distributed; nobody can say why."""
    _, mode = sharded(mesh_of((1, 2)), ["Layer"])
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="BXOR"), watching(mode.call_log, patience=9.0):
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR)
    assert time.monotonic() - start < 5


def test_ranks_that_all_fail_do_not_wait_for_a_cause(gloo: ProcessPool) -> None:
    gloo.run_fresh(_fail_in_collectives, world_size=2)


def _fail_together() -> list[float]:
    """The same error everywhere, a checkpoint that takes longer than the patience, and a second run."""
    model, mode = sharded(mesh_of((1, 2)), ["Layer"])
    sums = []
    for run in range(2):
        with watching(mode.call_log, patience=0.5, interval=0.1) as watchdog:
            for _ in range(2):  # The program catches the error, and goes on.
                watchdog.start()
                model(inputs_of(0), [run]).sum().backward()
                mode.finish_gradients()
                watchdog.failed(ValueError("the gradient is NaN"))
                if dist.get_rank() == 1:
                    time.sleep(1.2)
                total = torch.ones(())
                dist.all_reduce(total)
                sums.append(total.item())
    return sums


def test_ranks_that_fail_together_may_train_again(gloo: ProcessPool) -> None:
    assert gloo.run(_fail_together, world_size=2) == [[2.0] * 4] * 2


def _look_while_garbage_waits(times: int = 20) -> int:
    """Garbage that is to be collected next looks for the place of its thread, as the watchdog of a run that is over."""
    for look in (waiting_place, standing_place):
        for _ in range(times):
            gc.disable()
            over = threading.local()
            over.itself = over
            weakref.finalize(over, look, threading.get_ident())
            del over
            kept = [[] for _ in range(gc.get_threshold()[0] + 1)]
            gc.enable()
            look(threading.get_ident())
            assert gc.isenabled() and kept
    return times


def test_a_look_at_a_thread_collects_no_garbage_under_a_lock(gloo: ProcessPool) -> None:
    assert gloo.run_fresh(_look_while_garbage_waits, world_size=1, timeout=40.0) == [20]
