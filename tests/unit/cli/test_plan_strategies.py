"""Strategies side by side: loads, bytes and times, compared with what can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_muon.cli.plan_specs import Mesh, exchange_ranks
from lightning_muon.cli.plan_strategies import (
    GRID,
    MOST_RANKS_IN_FULL,
    PIPELINE,
    Outcome,
    PlanOptions,
    compare_strategies,
    lower_bound,
)
from lightning_muon.math.newton_schulz import newton_schulz_flops
from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape

_OPTIONS = PlanOptions(
    ns_steps=5, wire_itemsize=2, chunk_bytes=2**16, look_ahead=3, buffer_bytes=None, cost=PRESETS["reference"]
)


def _model(count: int = 16, rows: int = 256, cols: int = 128, kind: str = "matrix") -> ModelShapes:
    shape = (rows, cols) if kind == "matrix" else (4, rows, cols)
    matrices = [ParameterShape(name=f"m.{i}", shape=shape, kind=kind) for i in range(count)]
    bias = ParameterShape(name="bias", shape=(64,), kind="elementwise")
    return ModelShapes(name="model", source="", parameters=(*matrices, bias))


def _compare(model: ModelShapes, mesh: Mesh, options: PlanOptions = _OPTIONS) -> dict[str, Outcome]:
    return {outcome.name: outcome for outcome in compare_strategies(model, mesh, options)}


def test_equal_matrices_are_divided_evenly_and_computed_everywhere_by_the_redundant_strategy() -> None:
    outcomes = _compare(_model(), Mesh(replicate=1, shard=4))
    assert list(outcomes) == ["redundant", "round_robin", "lpt", PIPELINE]
    one = newton_schulz_flops(256, 128, 5)
    assert outcomes["lpt"].loads == (4 * one,) * 4
    assert outcomes["redundant"].loads == (16 * one,) * 4
    assert outcomes["lpt"].lower_bound == 4 * one


def test_every_matrix_moves_once_each_way_but_for_the_part_that_its_owner_has() -> None:
    outcomes = _compare(_model(), Mesh(replicate=1, shard=4))
    numel = 256 * 128
    for name in ("round_robin", "lpt", PIPELINE):
        received = [rank.gather_received[0] for rank in outcomes[name].bytes]
        assert received == [4 * numel * 3 // 4 * 2] * 4
        assert outcomes[name].floor.gather == (sum(received), 0) == outcomes[name].floor.scatter
    assert [rank.gather_received[0] for rank in outcomes["redundant"].bytes] == [16 * numel * 3 // 4 * 2] * 4


def test_serial_strategies_hide_nothing_and_the_pipeline_is_faster() -> None:
    outcomes = _compare(_model(64), Mesh(replicate=1, shard=4))
    assert outcomes["lpt"].hidden == pytest.approx(0, abs=1e-9)
    assert outcomes[PIPELINE].hidden > 0.5
    assert outcomes[PIPELINE].timeline.makespan < outcomes["lpt"].timeline.makespan


def test_the_owner_grid_removes_the_work_that_replicas_repeat() -> None:
    outcomes = _compare(_model(), Mesh(replicate=2, shard=2))
    assert max(outcomes[PIPELINE].loads) == 2 * max(outcomes[GRID].loads)
    assert len(outcomes[GRID].loads) == 4
    numel = 16 * 256 * 128 * 2
    # The other replica gets every update once.
    assert outcomes[GRID].floor.scatter == (numel // 2, numel)
    assert sum(rank.scatter_received[1] for rank in outcomes[GRID].bytes) == numel


def test_replicas_without_shards_divide_the_work_and_gather_nothing() -> None:
    outcomes = _compare(_model(), Mesh(replicate=4, shard=1))
    assert GRID not in outcomes
    assert max(outcomes["lpt"].loads) * 4 == sum(outcomes["lpt"].loads)
    assert all(rank.gather_received == (0, 0) for rank in outcomes["lpt"].bytes)
    assert all(sum(rank.scatter_received) == 0 for rank in outcomes["redundant"].bytes)


def test_one_rank_alone_moves_nothing() -> None:
    outcomes = _compare(_model(), Mesh(replicate=1, shard=1))
    assert all(outcome.timeline.ranks[0].transfer_seconds == 0 for outcome in outcomes.values())


@pytest.mark.parametrize("mesh", [Mesh(replicate=1, shard=MOST_RANKS_IN_FULL), Mesh(replicate=16, shard=1)])
def test_one_rank_stands_for_all_that_do_the_same(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    full = _compare(_model(40), mesh)
    monkeypatch.setattr("lightning_muon.cli.plan_strategies.MOST_RANKS_IN_FULL", 1)
    merged = _compare(_model(40), mesh)
    for name in full:
        # The redundant strategy packs its pieces once for all others, where a full simulation packs them for each.
        tolerance = 0.01 if name == "redundant" else 1e-12
        assert merged[name].timeline.makespan == pytest.approx(full[name].timeline.makespan, rel=tolerance)
        assert merged[name].idle == pytest.approx(full[name].idle, abs=tolerance)
        assert merged[name].hidden == pytest.approx(full[name].hidden, abs=tolerance)
        assert merged[name].loads == full[name].loads
        assert len(merged[name].timeline.spans) < 16
    assert merged["redundant"].note.startswith("rank 0 of 16 was simulated")


def test_plans_with_too_many_chunks_get_larger_ones_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_muon.cli.plan_strategies._MOST_OPS", 1)
    outcomes = _compare(_model(200), Mesh(replicate=1, shard=2), replace(_OPTIONS, chunk_bytes=1))
    assert outcomes["lpt"].num_chunks <= 9
    assert "smaller ones are too many to simulate" in outcomes["lpt"].note
    experts = _compare(_model(50, kind="stack"), Mesh(replicate=1, shard=2), replace(_OPTIONS, chunk_bytes=1))
    assert experts["lpt"].num_chunks <= 9


def test_experts_that_lie_on_one_rank_stay_there() -> None:
    outcomes = _compare(_model(3, kind="stack"), Mesh(replicate=1, shard=2))
    assert outcomes["lpt"].owners == ((0,), (0,), (1,), (1,)) * 3
    assert outcomes["lpt"].floor.gather == (0, 0)


def test_buffers_are_bounded_for_the_pipeline_only() -> None:
    free = _compare(_model(64), Mesh(replicate=1, shard=4))
    bound = free[PIPELINE].timeline.peak_bytes * 3 // 4
    bounded = _compare(_model(64), Mesh(replicate=1, shard=4), replace(_OPTIONS, buffer_bytes=bound))
    assert bounded[PIPELINE].timeline.peak_bytes <= bound
    with pytest.raises(ValueError, match="memory_bytes is 1000"):
        _compare(_model(64), Mesh(replicate=1, shard=4), replace(_OPTIONS, buffer_bytes=1000))


def test_a_faster_machine_is_faster() -> None:
    slow = CostModel(flops_per_second=1e9, memory_bytes_per_second=1e9, bandwidth=(1e8,))
    outcomes = _compare(_model(), Mesh(replicate=1, shard=1), replace(_OPTIONS, cost=slow))
    arithmetic = 16 * newton_schulz_flops(256, 128, 5) / 1e9
    assert outcomes["lpt"].timeline.makespan == pytest.approx(arithmetic, rel=0.05)
    assert outcomes["lpt"].timeline.makespan > arithmetic


def test_the_lower_bound_is_the_mean_or_the_dearest_matrix() -> None:
    specs = exchange_ranks(_model(3), Mesh(replicate=1, shard=2), ns_steps=5, is_grid=False).specs
    one = newton_schulz_flops(256, 128, 5)
    assert lower_bound(specs, 2) == 1.5 * one
    assert lower_bound(specs, 100) == one


def test_what_cannot_leave_its_rank_bounds_the_load() -> None:
    # Of each stack of 4 matrices the first two of 3 ranks have 2 each and the last has none.
    ranks = exchange_ranks(_model(5, kind="stack"), Mesh(replicate=1, shard=3), ns_steps=5, is_grid=False)
    assert lower_bound(ranks.specs, 3) == 10 * newton_schulz_flops(256, 128, 5)
    assert _compare(_model(5, kind="stack"), Mesh(replicate=1, shard=3))["lpt"].loads[2] == 0


def test_an_error_says_when_chunks_cannot_be_smaller() -> None:
    few, mesh = replace(_OPTIONS, buffer_bytes=1000, chunk_bytes=1), Mesh(replicate=1, shard=4)
    with pytest.raises(ValueError, match=r"at least 1 matrices .* --chunk-bytes does not help .* with --fused"):
        _compare(_model(64), mesh, few)
    with pytest.raises(ValueError, match=r"make the chunks smaller$"):
        _compare(_model(64), mesh, replace(few, chunk_bytes=2**20))


def test_chunks_are_told_by_the_bytes_of_an_owner() -> None:
    outcomes = _compare(_model(9), Mesh(replicate=1, shard=4))
    one = 256 * 128 * 2
    assert outcomes[PIPELINE].chunk_bytes == (one, one, one)
    assert outcomes[PIPELINE].num_chunks == 3
    assert outcomes["redundant"].chunk_bytes == (one,) * 9


def test_the_memory_of_newton_schulz_is_that_of_two_iterates_and_two_products() -> None:
    outcome = _compare(_model(2), Mesh(replicate=1, shard=2))[PIPELINE]
    assert outcome.newton_schulz_bytes == 2 * (2 * 256 * 128 + 2 * 128 * 128)


def test_plans_of_few_ranks_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(
        "lightning_muon.cli.plan_strategies.check_step", lambda program, plans: checked.append(len(program))
    )
    _compare(_model(), Mesh(replicate=1, shard=4))
    assert checked == [4, 4, 4, 4]
    _compare(_model(), Mesh(replicate=1, shard=2 * MOST_RANKS_IN_FULL))
    assert checked == [4, 4, 4, 4]


def test_a_model_without_matrices_is_refused() -> None:
    model = ModelShapes(name="norms", source="", parameters=(ParameterShape(name="a", shape=(4,), kind="elementwise"),))
    with pytest.raises(ValueError, match="norms has no matrices that are trained"):
        compare_strategies(model, Mesh(replicate=1, shard=2), _OPTIONS)
