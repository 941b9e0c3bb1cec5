"""When a rank with several stages waits for the sums of gradients over its data ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from lightning_muon.pipeline.batch_run import BatchRun
from lightning_muon.sharding import fsdp
from tests.distributed.pipeline.models import batch_of, chain
from tests.distributed.pipeline.test_agreement import _adamw, _engine, _take_step
from tests.support.processes import ProcessPool


def _events() -> list[str]:
    engine, optimizer = _engine(chain(6), _adamw, shard_size=2, pipeline_schedule="interleaved_1f1b")
    events: list[str] = []

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            events.append(name)
            return original(*args)

        return call

    with (
        patch.object(fsdp, "start_reducing", noted("start", fsdp.start_reducing)),
        patch.object(fsdp, "finish_reducing", noted("finish", fsdp.finish_reducing)),
        patch.object(BatchRun, "_backward", noted("backward", BatchRun._backward)),
    ):
        engine.run_pipeline(batch_of(8, 5, seed=0))
    engine.step(optimizer, _take_step)
    engine.close()
    return events


def test_no_stage_waits_for_the_sums_of_another_one(gloo: ProcessPool) -> None:
    for events in gloo.run(_events, world_size=4):
        num_roots = events.count("start")
        assert events[-num_roots:] == ["finish"] * num_roots and events.count("finish") == num_roots
        first, last_backward = events.index("start"), len(events) - 1 - events[::-1].index("backward")
        assert first < last_backward, "sums of the deeper stage travel while the other one runs backward"
