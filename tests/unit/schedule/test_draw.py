"""Pictures of timelines: what is in them, not how they look."""

from pathlib import Path

import pytest

from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.draw import draw_timelines
from lightning_muon.schedule.pipeline import Pipeline, StageCosts, add_reduce_grad, build_program, make_order
from lightning_muon.schedule.program import TRANSFER, Op
from lightning_muon.schedule.simulate import Timeline, simulate

_MACHINE = CostModel(flops_per_second=1.0, memory_bytes_per_second=1.0, bandwidth=(1.0,))


def _timeline(*costs: int) -> Timeline:
    """One rank per cost: a gather of 1 second on rank 0, Newton-Schulz of so many seconds on each."""
    program = {rank: [Op(kind="newton_schulz", key="0", rank=rank, cost=cost)] for rank, cost in enumerate(costs)}
    program[0].insert(0, Op(kind="gather", key="0", rank=0, bytes=1, lane=TRANSFER))
    return simulate(program, _MACHINE)


def _draw(path: Path, **timelines: Timeline) -> str:
    pytest.importorskip("matplotlib")
    draw_timelines(timelines, path, title="some plans")
    return path.read_text() if path.suffix == ".svg" else ""


def test_an_svg_has_titles_labels_ranks_and_a_legend(tmp_path: Path) -> None:
    text = _draw(tmp_path / "plan.svg", first=_timeline(4, 2), second=_timeline(3, 3))
    for words in ("some plans", "first: 4000 ms, idle 25.0%, communication hidden 100.0%", "rank 0", "rank 1", "C[0]"):
        assert words in text
    assert "G[i] gather" in text and "C[i] Newton-Schulz" in text and "S[i] scatter" not in text
    assert "time (ms)" in text
    # The same timelines give the same file.
    assert _draw(tmp_path / "again.svg", first=_timeline(4, 2), second=_timeline(3, 3)) == text


def test_a_pipeline_has_a_row_per_rank_with_messages_above(tmp_path: Path) -> None:
    pipeline = Pipeline(num_ranks=2, num_microbatches=3, costs=StageCosts(communication=0.5))
    program = add_reduce_grad(build_program(make_order("zb_h1", pipeline), pipeline))
    text = _draw(tmp_path / "pipeline.svg", zb_h1=simulate(program, pipeline.costs))
    for words in (
        "rank 0",
        "rank 1",
        "F[0.2]",
        "I[1.0]",
        "W[1.2]",
        "a[0.0]",
        "g[1.2]",
        "F[i] forward",
        "g[i] gradient",
    ):
        assert words in text
