"""What of a step is exposed, and ranks that differ or fail; the numbers: tests/integration/test_muon_monitor.py."""

import threading
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_muon import StepMonitor
from lightning_muon.monitor import step_monitor
from lightning_muon.monitor.step_monitor import WHOLE_STEP, TimelineRecorder, part_seconds
from lightning_muon.schedule.program import TRANSFER, Op, OpKind
from lightning_muon.schedule.simulate import Span
from tests.distributed.sharding.training import Training, mesh_of
from tests.support.processes import ProcessPool, RanksFailedError


def _span(kind: str, start: float, end: float, lane: str = "compute") -> Span:
    return Span(Op(kind=kind, key=str(start), rank=0, lane=lane), start, end)


def test_communication_is_exposed_in_the_step_where_nothing_is_computed() -> None:
    found = part_seconds(
        [
            _span(OpKind.GATHER, 0, 3, TRANSFER),  # In backward, and one second of the step.
            Span(WHOLE_STEP, 2, 20),
            _span(OpKind.NEWTON_SCHULZ, 4, 8),
            _span(OpKind.SCATTER, 7, 11, TRANSFER),
            _span(OpKind.UPDATE, 11, 12),
        ]
    )
    assert found == {
        "gather": 3,
        "newton_schulz": 4,
        "scatter": 4,
        "update": 1,
        "total": 18,
        "exposed_communication": 1 + 3,
        "other": 18 - 5 - 4,
    }


def test_spans_wait_for_an_op_that_ends_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = TimelineRecorder(torch.device("cpu"))
    op = Op(kind="gather", key="3", rank=0, lane=TRANSFER)
    recorded.started(op)
    with monkeypatch.context() as patched:
        patched.setattr(step_monitor, "_LATEST_END_SECONDS", 0.01)
        with pytest.raises(RuntimeError, match=r"gather\[3\]"):
            recorded.spans()
    threading.Timer(0.05, recorded.ended, [op]).start()
    (span,) = recorded.spans()
    assert span.op is op and span.end - span.start >= 0.05


def _steps(every: list[int], *, fails: bool) -> None:
    training, is_second = Training.start("fsdp", mesh_of((2,))), dist.get_rank() == 1
    StepMonitor(training.optimizer, every_n_steps=every[is_second])
    for step in range(2):
        broken = mock.patch.object(step_monitor, "part_seconds", side_effect=OSError("disk"))
        with broken if fails and step and is_second else nullcontext():
            training.step(step)


@pytest.mark.parametrize(
    ("every", "fails", "words"),
    [([2, 3], False, ["every_n_steps"]), ([2, 2], True, ["disk", "rank 1 of the group failed"])],
)
def test_ranks_that_differ_or_fail_raise_together(
    gloo: ProcessPool, every: list[int], fails: bool, words: list[str]
) -> None:
    with pytest.raises(RanksFailedError) as raised:
        gloo.run(_steps, every, fails=fails, world_size=2, timeout=20)
    assert not raised.value.running, "a rank hangs"
    text = "".join(failure.message for failure in raised.value.failures.values())
    assert all(word in text for word in words)
