"""Bubble and memory of each schedule against the formulas of its docstring; all sizes and costs, in files too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from torch.distributed.pipelining import schedules

from lightning_muon.schedule.pipeline import (
    Pipeline,
    add_reduce_grad,
    add_unshard,
    build_program,
    forward_only,
    make_order,
    order_from_csv,
    order_to_csv,
    peak_activations,
    stage_ranks,
)
from lightning_muon.schedule.program import validate
from tests.unit.schedule.pipeline.problems import fitting, idle_seconds, problems, timeline

# Schedule: idle seconds for ranks p and (f, i, w), and memory for p and m; by any costs, or by f = i = w.
_ANY: dict[str, tuple[Callable[[int, float, float, float], float], Callable[[int, int], float]]] = {
    "gpipe": (lambda p, f, i, w: (p - 1) * (f + i + w), lambda p, m: m / p),
    "1f1b": (lambda p, f, i, w: (p - 1) * (f + i + w), lambda p, m: 1),
    "interleaved_1f1b": (lambda p, f, i, w: (p - 1) * (f + i + w), lambda p, m: 1 + (p - 1) / (2 * p)),
    "zb_h1": (lambda p, f, i, w: (p - 1) * (f + i - w), lambda p, m: 1),
    "zb_1p": (lambda p, f, i, w: (p - 1) * (f + i - w), lambda p, m: 1),
}
_EQUAL: dict[str, tuple[Callable[[int, float, float, float], float], Callable[[int, int], float]]] = {
    "zb_2p": (lambda p, f, i, w: 0, lambda p, m: (2 * p - 1) / p),
    "zb_v": (lambda p, f, i, w: 0, lambda p, m: 1),
    "v_half": (lambda p, f, i, w: f * (3 * (p - 1) - p % 2), lambda p, m: (p + 2 - p % 2) / (2 * p)),
    "v_min": (lambda p, f, i, w: f * (4 * p - 5 + 2 * (p % 3 == 0)), lambda p, m: math.ceil((p + 2) / 3) / p),
}


@pytest.mark.parametrize(
    ("name", "costs"),
    [*((name, costs) for name in _ANY for costs in ((1, 1, 1), (5, 4, 3))), *((name, (1, 1, 1)) for name in _EQUAL)],
)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 9, 12])
def test_idle_time_and_memory_are_those_of_the_formula(
    name: str, costs: tuple[float, float, float], num_ranks: int
) -> None:
    idle, memory = (_ANY | _EQUAL)[name]
    for num_microbatches in (2 * num_ranks, 3 * num_ranks + (name in _EQUAL)):
        pipeline = fitting(name, num_ranks, num_microbatches, *costs)
        order = make_order(name, pipeline)
        assert idle_seconds(timeline(order, pipeline)) == pytest.approx(idle(num_ranks, *costs), abs=1e-9)
        held = max(map(peak_activations, order)) / pipeline.num_stages
        assert held == pytest.approx(memory(num_ranks, num_microbatches))


@settings(deadline=None, max_examples=100)
@given(problems())
def test_every_schedule_of_any_size_and_costs_can_run(problem: tuple[str, Pipeline]) -> None:
    name, pipeline = problem
    order = make_order(name, pipeline)
    assert order_from_csv(order_to_csv(order)) == order
    validate(add_reduce_grad(add_unshard(build_program(order, pipeline))))
    rank_of = stage_ranks(order)
    for num_microbatches in (1, pipeline.num_microbatches):
        evaluation = replace(pipeline, num_microbatches=num_microbatches)
        forwards = forward_only(evaluation, rank_of)
        assert stage_ranks(forwards) == rank_of
        validate(build_program(forwards, evaluation))
        assert sum(map(len, forwards)) == num_microbatches * pipeline.num_stages
        assert timeline(forwards, evaluation).peak_bytes == 0


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_1p", "v_half"])
def test_torch_reads_our_files_and_writes_the_same(name: str, tmp_path: Path) -> None:
    pipeline, path = fitting(name, 3, 6), str(tmp_path / "schedule.csv")
    order = make_order(name, pipeline)
    Path(path).write_text(order_to_csv(order), newline="")
    is_v = name == "v_half"
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=index, num_stages=6, group_size=3, group_rank=0, is_first=index == 0, is_last=index == 5,
            submod=None,
        )
        for index in (pipeline.v_stages(0) if is_v else pipeline.loop_stages(0))
    ]  # fmt: skip
    runtime = schedules._PipelineScheduleRuntime(stages, 6)
    runtime._load_csv(path, "compute_only")  # Adds messages; raises where a rank would wait for ever.
    runtime._dump_csv(path, "compute_only")
    assert order_from_csv(Path(path).read_text()) == order
