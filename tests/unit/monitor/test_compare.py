"""Measured against predicted steps."""

from __future__ import annotations

import pytest

from lightning_muon.monitor.calibrate import Comparison, compare, matrix_shapes
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape
from tests.support.processes import ProcessPool

MODEL = ModelShapes(
    name="small",
    source="",
    parameters=(
        *(ParameterShape(name=f"w{i}", shape=(48, 32), kind="matrix") for i in range(5)),
        ParameterShape(name="qkv", shape=(60, 20), kind="matrix", splits=(20, 20, 20)),
        ParameterShape(name="experts", shape=(2, 8, 4), kind="stack"),
        ParameterShape(name="bias", shape=(48,), kind="elementwise"),
        ParameterShape(name="frozen", shape=(48, 48), kind="matrix", frozen=True),
    ),
)


def test_every_logical_matrix_that_is_trained_counts() -> None:
    assert matrix_shapes(MODEL) == [(48, 32)] * 5 + [(20, 20)] * 3 + [(8, 4)] * 2


def _compare() -> list[Comparison]:
    options = [{"overlap": "off", "chunk_bytes": 4096}, {"overlap": "step", "chunk_bytes": 4096}]
    return compare(MODEL, num_replicas=1, num_steps=2, options=options)


def test_the_same_ops_are_measured_and_predicted(gloo: ProcessPool) -> None:
    for comparison in gloo.run(_compare, world_size=2)[0]:
        measured, predicted = comparison.recording.timeline, comparison.predicted
        assert len(comparison.measured_seconds) == 2
        assert comparison.measured == min(comparison.measured_seconds) == measured.makespan
        assert comparison.ratio == pytest.approx(predicted.makespan / measured.makespan)
        assert comparison.ratio > 0
        for rank in (0, 1):
            names = [span.op.name for span in measured.spans[rank]]
            assert names == [span.op.name for span in predicted.spans[rank]]
