"""Recorded steps, measured cost models, predictions of the same steps, and functions that run on several ranks."""

import threading
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from lightning_muon import ParallelMuon
from lightning_muon.monitor import calibrate as calibrate_module
from lightning_muon.monitor import timeline
from lightning_muon.monitor.calibrate import (
    Comparison,
    calibrate,
    compare,
    fit_compute,
    fit_line,
    fit_steps,
    make_optimizer,
    run_on_ranks,
    sample_matrices,
    this_device,
)
from lightning_muon.monitor.timeline import Recording, TimelineRecorder, record_step
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.program import TRANSFER, Op, OpKind
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape
from lightning_muon.schedule.simulate import Span, simulate
from lightning_muon.schedule.validate import validate
from tests.support.processes import ProcessPool


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1.0, 5.0), (3.0, 9.0), (2.0, 7.0)], (2.0, 3.0)),
        # Without a sensible line there is no constant, and the slope is the sum of y over the sum of x.
        ([(2.0, 6.0), (2.0, 8.0)], (3.5, 0.0)),
        ([(1.0, 9.0), (3.0, 5.0)], (3.5, 0.0)),
        ([(1.0, 1.0), (3.0, 13.0)], (3.5, 0.0)),
    ],
)
def test_a_line_is_found(points: list[tuple[float, float]], expected: tuple[float, float]) -> None:
    assert fit_line(points) == pytest.approx(expected)


def test_the_rates_behind_simulated_durations_are_found_again() -> None:
    machine = CostModel(
        flops_per_second=2e11, memory_bytes_per_second=1e10, bandwidth=(1e9,), op_seconds=1e-4, latency_seconds=(1e-5,)
    )
    ops = [
        Op(kind=OpKind.MOMENTUM, key="0", rank=0, bytes=10**7),
        Op(kind=OpKind.GATHER, key="0", rank=0, bytes=10**6, lane=TRANSFER, group=(0, 1)),
        Op(kind=OpKind.NEWTON_SCHULZ, key="0", rank=0, cost=4 * 10**9, bytes=10**6),
        Op(kind=OpKind.NEWTON_SCHULZ, key="1", rank=0, cost=0, bytes=0),
        Op(kind=OpKind.UPDATE, key="0", rank=0, bytes=3 * 10**6),
    ]
    found = fit_compute([Span(op, 1.0, 1.0 + machine.seconds(op)) for op in ops])
    assert found == pytest.approx(
        {"flops_per_second": 2e11, "memory_bytes_per_second": 1e10, "op_seconds": 1e-4}, rel=1e-6
    )


@pytest.mark.parametrize("wrong", [0.5, 1.0, 3.0])
def test_the_rate_that_whole_steps_had_is_found(wrong: float) -> None:
    machine = CostModel(flops_per_second=2e9, memory_bytes_per_second=1e9, bandwidth=(1e8,))
    recordings: list[Recording] = []
    for flops in (10**9, 3 * 10**9):
        ops = [
            Op(kind=OpKind.MOMENTUM, key="0", rank=0, bytes=10**8),
            Op(kind=OpKind.NEWTON_SCHULZ, key="0", rank=0, cost=flops),
        ]
        timeline = simulate({0: ops}, machine)
        recordings.append(Recording(timeline=timeline, program={0: ops}, matrices={0: {}}))
    found = fit_steps(replace(machine, flops_per_second=wrong * 2e9), recordings, device_type="cpu")
    assert found.flops_per_second == pytest.approx(2e9, rel=1e-6)
    assert found.memory_bytes_per_second == 1e9


@pytest.mark.parametrize(
    ("counts", "num_ranks", "expected"),
    [
        # 40 GFLOP per rank: 8 matrices of 4.6 GFLOP on average, 72/97 of them square. Long sides are cut to 1024.
        (
            {(512, 512): 72, (2048, 512): 12, (512, 2048): 12, (5, 5): 1},
            3,
            {(512, 512): 18, (1024, 512): 3, (512, 1024): 3, (5, 5): 3},
        ),
        # 32 GFLOP each, so that a second one for each rank would be more than 40.
        ({(8192, 28672): 80}, 2, {(1024, 1024): 2}),
    ],
)
def test_the_sample_has_the_mix_of_the_model_for_every_rank(counts: Any, num_ranks: int, expected: Any) -> None:
    model = sample_matrices(counts, num_ranks=num_ranks)
    assert Counter(parameter.shape for parameter in model.parameters) == expected


MODEL = ModelShapes(
    name="mixed",
    source="",
    parameters=(
        ParameterShape(name="a", shape=(5, 3), kind="matrix"),
        ParameterShape(name="qkv", shape=(6, 2), kind="matrix", splits=(2, 2, 2)),
        ParameterShape(name="experts", shape=(3, 4, 2), kind="stack", shard_dim=1),
        ParameterShape(name="norm", shape=(3,), kind="elementwise"),
        ParameterShape(name="frozen", shape=(9, 9), kind="matrix", frozen=True),
    ),
)


def _calibrated(num_ranks: int, num_replicas: int) -> dict[str, object]:
    shapes = [(64, 64)] * 6 + [(32, 96)] * 2
    parameters = (ParameterShape(name=f"w{i}", shape=shape, kind="matrix") for i, shape in enumerate(shapes))
    model = ModelShapes(name="m", source="", parameters=tuple(parameters))
    return asdict(calibrate(model, num_ranks=num_ranks, num_replicas=num_replicas, compute_dtype="float32"))


@pytest.mark.parametrize(("num_ranks", "num_replicas", "num_links"), [(1, 1, 1), (2, 1, 1), (4, 2, 2)])
def test_all_ranks_measure_the_same_machine(
    gloo: ProcessPool, num_ranks: int, num_replicas: int, num_links: int
) -> None:
    results = gloo.run(_calibrated, num_ranks, num_replicas, world_size=num_ranks)
    assert all(result == results[0] for result in results)
    machine = CostModel.from_dict(results[0])
    assert len(machine.bandwidth) == len(machine.latency_seconds) == num_links
    # Any computer on which this runs: from 10 MFLOP/s to 100 TFLOP/s, from 1 MB/s of links on.
    assert 1e7 < machine.flops_per_second < 1e14
    assert machine.memory_bytes_per_second > 1e6 and min(machine.bandwidth) > 1e6
    assert 0 <= machine.op_seconds < 1 and max(machine.latency_seconds) < 1


def _compare() -> list[Comparison]:
    options = [{"overlap": "off", "chunk_bytes": 4096}, {"overlap": "step", "chunk_bytes": 4096}]
    return compare(MODEL, num_replicas=1, num_steps=2, options=options)


def test_the_same_ops_are_measured_and_predicted(gloo: ProcessPool) -> None:
    for comparison in gloo.run(_compare, world_size=2)[0]:
        measured, predicted = comparison.recording.timeline, comparison.predicted
        assert len(comparison.measured_seconds) == 2
        assert 0 < measured.makespan == min(comparison.measured_seconds) and predicted.makespan > 0
        for rank in (0, 1):
            names = [span.op.name for span in measured.spans[rank]]
            assert names == [span.op.name for span in predicted.spans[rank]]


def rank_sum(start: int) -> tuple[int, int]:
    """This rank and ``start`` plus the sum of all ranks."""
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), start + int(total)


def _inside(num_ranks: int) -> tuple[int, int]:
    assert this_device() == torch.device("cpu")
    return run_on_ranks(rank_sum, 10, num_ranks=num_ranks)


def test_inside_a_process_group_each_rank_gets_its_own_result(gloo: ProcessPool) -> None:
    assert gloo.run(_inside, 3, world_size=3) == [(0, 13), (1, 13), (2, 13)]


def test_elsewhere_processes_are_started_and_rank_0_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    # Started as mp.spawn starts them, from a process that has imported torch.
    monkeypatch.setattr(calibrate_module.mp, "spawn", partial(mp.start_processes, start_method="forkserver"))
    assert run_on_ranks(rank_sum, 20, num_ranks=2) == (0, 21)


def test_a_launcher_with_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="process group of 4 ranks, but 2"):
        run_on_ranks(rank_sum, 20, num_ranks=2)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_on_ranks(rank_sum, 20, num_ranks=0)


def _record(num_replicas: int, overlap: str, dedupe: str) -> Recording:
    optimizer = make_optimizer(MODEL, num_replicas=num_replicas, overlap=overlap, dedupe=dedupe, chunk_bytes=50)
    optimizer.step()
    return record_step(optimizer)


@pytest.mark.parametrize(
    ("world_size", "num_replicas", "overlap", "dedupe"),
    [(1, 1, "step", "auto"), (3, 1, "step", "auto"), (4, 1, "off", "auto"), (4, 2, "step", "never")],
)
def test_every_op_is_recorded_after_what_it_depends_on(
    gloo: ProcessPool, world_size: int, num_replicas: int, overlap: str, dedupe: str
) -> None:
    recordings = gloo.run(_record, num_replicas, overlap, dedupe, world_size=world_size)
    assert len({repr(each.timeline) for each in recordings}) == 1, "every rank has all of it"
    recording = recordings[0]
    validate(recording.program)
    assert sorted(recording.program) == list(range(world_size))
    owned = [
        name for named in recording.matrices.values() for op, names in named.items() if "newton" in op for name in names
    ]
    assert "a" in owned and len(set(owned)) == 7 and len(owned) == 7 * num_replicas
    starts: dict[tuple[str, tuple[int, ...]], set[float]] = {}
    for rank, spans in recording.timeline.spans.items():
        ends = {span.op.name: span.end for span in spans}
        assert {span.op.rank for span in spans} == {rank}
        assert sum(span.op.kind == OpKind.ADAMW for span in spans) == 1
        assert len(ends) == len(spans)
        for op, start, end in spans:
            assert 0 <= start <= end <= recording.timeline.makespan
            # A communication ends in a thread that may say so later than its waiter goes on: see below.
            assert op.lane == TRANSFER or all(ends[name] <= end + 0.05 for name in op.deps)
            if op.group and start < end:
                starts.setdefault((op.name, op.group), set()).add(start)
    assert all(len(times) == 1 for times in starts.values()), "a communication begins at once on all its ranks"
    if num_replicas == 2:  # Ranks of the world, not of the exchange group.
        assert {group for _, group in starts} == {(0, 1), (2, 3)}


def test_spans_wait_for_an_op_that_ends_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TimelineRecorder(torch.device("cpu"))
    op = Op(kind="gather", key="3", rank=0, lane=TRANSFER)
    recorder.started(op)
    with monkeypatch.context() as patched:
        patched.setattr(timeline, "_LATEST_END_SECONDS", 0.01)
        with pytest.raises(RuntimeError, match=r"gather\[3\]"):
            recorder.spans()
    threading.Timer(0.05, recorder.ended, [op]).start()
    (span,) = recorder.spans()
    assert span.op is op and span.end - span.start >= 0.05


def test_an_optimizer_without_a_plan_cannot_be_recorded() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="take one step before"):
        record_step(ParallelMuon([nn.Parameter(torch.zeros(2, 2))]))
