"""Timelines, against closed forms and lower bounds; pictures of them; broken programs; seconds of an op."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_muon.schedule.draw import draw_timelines
from lightning_muon.schedule.pipeline import Pipeline, StageCosts, add_reduce_grad, build_program, make_order
from lightning_muon.schedule.program import TRANSFER, Op, Program, issue_ahead, validate
from lightning_muon.schedule.simulate import CostModel, simulate
from tests.unit.schedule.specs import UNIT, collective, compute, sharded, step_of


def test_a_serial_rank_takes_the_sum() -> None:
    timeline = simulate({0: [compute("a", 2), collective("b", 3, "a[0]"), compute("c", 5, "b[0]")]}, UNIT)
    assert [(span.start, span.end) for span in timeline.spans[0]] == [(0, 2), (2, 5), (5, 10)]
    assert timeline.makespan == 10
    (summary,) = timeline.ranks.values()
    assert (summary.compute_seconds, summary.transfer_seconds, summary.exposed_seconds) == (7, 3, 3)
    assert (timeline.idle, timeline.hidden) == (pytest.approx(0.3), 0)


def test_a_transfer_that_nothing_waits_for_is_hidden() -> None:
    timeline = simulate({0: [collective("b", 3), compute("a", 4)]}, UNIT)
    assert (timeline.makespan, timeline.idle, timeline.hidden) == (4, 0, 1)
    empty = simulate({}, UNIT)
    assert (empty.makespan, empty.idle, empty.hidden, empty.peak_bytes) == (0, 0, 1, 0)
    half = simulate({0: [collective("b", 8), compute("a", 4)]}, UNIT)
    assert (half.idle, half.hidden) == (0.5, 0.5)


def test_a_collective_waits_for_the_last_and_slowest_rank() -> None:
    program = {
        0: [compute("a", 1), collective("all", 2, "a[0]", group=(0, 1)), compute("b", 1, "all[0]")],
        1: [compute("a", 5, rank=1), collective("all", 7, "a[0]", rank=1, group=(0, 1))],
    }
    timeline = simulate(program, UNIT)
    assert [timeline.spans[rank][1][1:] for rank in (0, 1)] == [(5, 12), (5, 12)]
    assert timeline.makespan == 13
    # Waiting for rank 1 is idle time, but no transfer.
    assert timeline.ranks[0].transfer_seconds == 7
    assert timeline.ranks[0].compute_seconds == 2


def test_peak_bytes_count_results_until_their_last_use() -> None:
    ops = [
        compute("a", 2, memory=5),
        collective("b", 3, memory=7),
        compute("c", 2, "a[0]", memory=11),
        compute("d", 2, "b[0]", "c[0]"),
    ]
    # a 0-4, b 0-6, c 2-6.
    timeline = simulate({0: ops}, UNIT)
    assert timeline.ranks[0].peak_bytes == timeline.peak_bytes == 23
    # What a frees at 4 is there for what begins at 4.
    ops[2:] = [compute("c", 2, "a[0]"), compute("d", 2, "b[0]", memory=11), compute("e", 1, "d[0]")]
    assert simulate({0: ops}, UNIT).peak_bytes == 18


def test_pictures_have_titles_labels_ranks_and_a_legend(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pipeline = Pipeline(num_ranks=2, num_microbatches=3, costs=StageCosts(communication=0.5))
    program = add_reduce_grad(build_program(make_order("zb_h1", pipeline), pipeline))
    step = {0: [collective("gather", 1), compute("newton_schulz", 4)], 1: [compute("newton_schulz", 2, rank=1)]}
    timelines = {"step": simulate(step, UNIT), "zb_h1": simulate(program, pipeline.costs)}
    for picture in ("plan.svg", "again.svg"):
        draw_timelines(timelines, tmp_path / picture, title="some plans")
    text = (tmp_path / "plan.svg").read_text()
    assert text == (tmp_path / "again.svg").read_text()
    for words in (
        *("some plans", "step: 4000 ms, idle 25.0%, communication hidden 100.0%", "rank 0", "rank 1", "time (ms)"),
        *("G[i] gather", "C[i] Newton-Schulz", "C[0]", "F[i] forward", "g[i] gradient"),
        *("F[0.2]", "I[1.0]", "W[1.2]", "a[0.0]", "g[1.2]"),
    ):
        assert words in text
    assert "S[i] scatter" not in text


def _in(kind: str, rank: int, *group: int) -> Op:
    return collective(kind, 1, rank=rank, group=group)


_ZERO, _ONE = ([_in(kind, rank, 0, 1) for kind in ("gather", "scatter")] for rank in (0, 1))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ({0: [compute("a", 1, memory=3)]}, r"a\[0\] of rank 0 has a result of 3 bytes that nothing uses"),
        ({0: [compute("a", 1), compute("a", 1)]}, r"a\[0\] of rank 0 is there twice"),
        ({0: [compute("a", 1, "gone[0]")]}, r"a\[0\] of rank 0 depends on gone\[0\], which this rank does not have"),
        ({0: [_in("all", 0, 1, 2)]}, r"all\[0\] of rank 0 is a communication of \(1, 2\)"),
        ({0: [_in("all", 0, 0, 0)]}, r"all\[0\] of rank 0 is a communication of \(0, 0\)"),
        # Communications that a rank lacks, or has with others, or in another order.
        ({0: _ZERO, 1: _ONE[:1]}, r"scatter\[0\] of rank 0 waits for rank 1"),
        ({0: _ZERO[:1], 1: [_in("gather", 1, 1, 2)], 2: []}, r"gather\[0\] of rank 0 waits for rank 1; .* for rank 2"),
        ({0: _ZERO, 1: _ONE[::-1]}, r"gather\[0\] of rank 0 waits for rank 1; scatter\[0\] of rank 1 waits for rank 0"),
        ({0: [compute("a", 1, "b[0]"), compute("b", 1)]}, r"2 ops can never begin: a\[0\] of rank 0 waits for b\[0\]"),
        (
            {rank: [_in("gather", rank, *range(99))] for rank in range(20)},
            "20 ops can never begin: .*; and 12 more ranks",
        ),
    ],
)
def test_a_broken_program_is_refused(program: Program, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(program)


SHORT = {"momentum": "M", "gather": "G", "newton_schulz": "C", "scatter": "S", "update": "U", "adamw": "A"}


def _order(ops: list[Op]) -> str:
    return " ".join(SHORT[op.kind] + op.key for op in ops)


@pytest.mark.parametrize(
    ("look_ahead", "expected"),
    [
        (0, "M0 G0 C0 S0 U0 M1 G1 C1 S1 U1 M2 G2 C2 S2 U2 M3 G3 C3 S3 U3 A0"),
        (1, "M0 G0 A0 C0 S0 M1 G1 C1 S1 U0 M2 G2 C2 S2 U1 M3 G3 C3 S3 U2 U3"),
        (2, "M0 G0 M1 G1 A0 C0 S0 M2 G2 C1 S1 U0 M3 G3 C2 S2 U1 C3 S3 U2 U3"),
        # With more buffers for scatters, updates come later.
        (3, "M0 G0 M1 G1 M2 G2 A0 C0 S0 M3 G3 C1 S1 C2 S2 U0 C3 S3 U1 U2 U3"),
        (9, "M0 G0 M1 G1 M2 G2 M3 G3 A0 C0 S0 C1 S1 C2 S2 C3 S3 U0 U1 U2 U3"),
    ],
)
def test_gathers_come_before_adamw_and_updates_late(look_ahead: int, expected: str) -> None:
    issued = issue_ahead(step_of(sharded([10] * 8, 2)), look_ahead)
    assert _order(issued[0]) == _order(issued[1]) == expected


MACHINE = CostModel(
    flops_per_second=100.0,
    memory_bytes_per_second=10.0,
    op_seconds=0.5,
    bandwidth=(4.0, 2.0),
    latency_seconds=(0.25, 1.0),
)


def _links(*bandwidth: float, latencies: tuple[float, ...] = (0.0,)) -> CostModel:
    return replace(MACHINE, bandwidth=bandwidth, latency_seconds=latencies)


def test_compute_takes_its_flops_memory_traffic_and_a_launch() -> None:
    assert MACHINE.seconds(Op(kind="newton_schulz", key="0", rank=0, cost=200, bytes=30)) == 2 + 3 + 0.5
    assert MACHINE.seconds(Op(kind="newton_schulz", key="0", rank=0)) == 0


@pytest.mark.parametrize(
    ("machine", "sizes", "seconds"),
    [
        # The slowest link bounds a transfer.
        (MACHINE, {"bytes": 8}, 0.25 + 2),
        (MACHINE, {"bytes": 10, "axis_bytes": (8, 2)}, max(0.25 + 2, 1 + 1)),
        (MACHINE, {"bytes": 14, "axis_bytes": (8, 6)}, 1 + 3),
        (MACHINE, {"bytes": 6, "axis_bytes": (0, 6)}, 1 + 3),
        # A collective without bytes takes a latency, and a transfer alone takes none.
        (MACHINE, {"axis_bytes": (0, 0), "group": (0, 1)}, 0.25),
        (MACHINE, {"group": (0,)}, 0),
        # Axes share a single link; what goes out and what comes in go over it at the same time.
        (_links(2.0), {"bytes": 8, "axis_bytes": (2, 8)}, 4),
        (_links(1.0), {"bytes": 2, "axis_bytes": (1, 1)}, 2),
        (_links(1.0, 1.0), {"bytes": 2, "axis_bytes": (1, 1)}, 1),
        (_links(8.0, 1.0), {"bytes": 13, "axis_bytes": (8, 2, 3)}, 5),
        # A shared link has the latency of its slowest axis that carries any.
        (_links(2.0, latencies=(0.25, 1.0)), {"bytes": 8, "axis_bytes": (6, 2)}, 1 + 4),
        (_links(2.0, latencies=(0.25, 1.0)), {"bytes": 8, "axis_bytes": (8, 0)}, 0.25 + 4),
    ],
)
def test_links_work_side_by_side(machine: CostModel, sizes: dict[str, Any], seconds: float) -> None:
    assert machine.seconds(Op(kind="gather", key="0", rank=0, lane=TRANSFER, **sizes)) == seconds
