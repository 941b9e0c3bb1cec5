"""What a recorder says of ops that end in other threads."""

import threading

import pytest
import torch

from lightning_muon.monitor import recorder
from lightning_muon.monitor.recorder import TimelineRecorder
from lightning_muon.schedule.program import TRANSFER, Op


def test_spans_wait_for_an_op_that_ends_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = TimelineRecorder(torch.device("cpu"))
    op = Op(kind="gather", key="3", rank=0, lane=TRANSFER)
    recorded.started(op)
    with monkeypatch.context() as patched:
        patched.setattr(recorder, "_LATEST_END_SECONDS", 0.01)
        with pytest.raises(RuntimeError, match=r"gather\[3\]"):
            recorded.spans()
    threading.Timer(0.05, recorded.ended, [op]).start()
    (span,) = recorded.spans()
    assert span.op is op and span.end - span.start >= 0.05
