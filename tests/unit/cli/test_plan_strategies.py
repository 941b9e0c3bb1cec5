"""Strategies side by side: loads, bytes and times, compared with what can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_strategies import (
    GRID,
    MOST_RANKS_IN_FULL,
    PIPELINE,
    CompareOptions,
    Outcome,
    choice_of,
    compare_strategies,
    lower_bound,
    wire_itemsize,
)
from lightning_muon.config import MuonConfig
from lightning_muon.math.newton_schulz import newton_schulz_flops
from lightning_muon.schedule.cost import PRESETS, CostModel
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape

_OPTIONS = CompareOptions(
    ns_steps=5, wire_itemsize=2, chunk_bytes=2**16, look_ahead=3, buffer_bytes=None, cost=PRESETS["reference"]
)


def _model(count: int = 16, rows: int = 256, cols: int = 128, kind: str = "matrix") -> ModelShapes:
    shape = (rows, cols) if kind == "matrix" else (4, rows, cols)
    matrices = [ParameterShape(name=f"m.{i}", shape=shape, kind=kind) for i in range(count)]
    bias = ParameterShape(name="bias", shape=(64,), kind="elementwise")
    return ModelShapes(name="model", source="", parameters=(*matrices, bias))


def _compare(model: ModelShapes, mesh: Mesh, options: CompareOptions = _OPTIONS) -> dict[str, Outcome]:
    return {outcome.name: outcome for outcome in compare_strategies(model, mesh, options)}


def test_equal_matrices_are_divided_evenly_or_computed_everywhere() -> None:
    outcomes = _compare(_model(), Mesh(replicate=1, shard=4))
    assert list(outcomes) == ["redundant", "round_robin", "lpt", PIPELINE]
    one = newton_schulz_flops(256, 128, 5)
    assert outcomes["lpt"].loads == (4 * one,) * 4
    assert outcomes["redundant"].loads == (16 * one,) * 4
    assert outcomes["lpt"].lower_bound == 4 * one


def test_matrices_move_once_each_way_but_for_the_owners_part() -> None:
    outcomes = _compare(_model(), Mesh(replicate=1, shard=4))
    numel = 256 * 128
    for name in ("round_robin", "lpt", PIPELINE):
        received = [rank.gather_received[0] for rank in outcomes[name].bytes]
        assert received == [4 * numel * 3 // 4 * 2] * 4
        assert outcomes[name].floor.gather == (sum(received), 0) == outcomes[name].floor.scatter
    assert [rank.gather_received[0] for rank in outcomes["redundant"].bytes] == [16 * numel * 3 // 4 * 2] * 4


def test_serial_strategies_hide_nothing() -> None:
    outcomes = _compare(_model(64), Mesh(replicate=1, shard=4))
    assert outcomes["lpt"].timeline.hidden == pytest.approx(0, abs=1e-9)
    assert outcomes[PIPELINE].timeline.hidden > 0.5
    assert outcomes[PIPELINE].timeline.makespan < outcomes["lpt"].timeline.makespan


def test_the_owner_grid_removes_the_work_that_replicas_repeat() -> None:
    outcomes = _compare(_model(), Mesh(replicate=2, shard=2))
    assert max(outcomes[PIPELINE].loads) == 2 * max(outcomes[GRID].loads)
    assert len(outcomes[GRID].loads) == 4
    numel = 16 * 256 * 128 * 2
    # The other replica gets every update once.
    assert outcomes[GRID].floor.scatter == (numel // 2, numel)
    assert sum(rank.scatter_received[1] for rank in outcomes[GRID].bytes) == numel


def test_replicas_without_shards_gather_nothing() -> None:
    outcomes = _compare(_model(), Mesh(replicate=4, shard=1))
    assert GRID not in outcomes
    assert max(outcomes["lpt"].loads) * 4 == sum(outcomes["lpt"].loads)
    assert all(rank.gather_received == (0, 0) for rank in outcomes["lpt"].bytes)
    assert all(sum(rank.scatter_received) == 0 for rank in outcomes["redundant"].bytes)


def test_one_rank_alone_moves_nothing() -> None:
    outcomes = _compare(_model(), Mesh(replicate=1, shard=1))
    assert all(outcome.timeline.ranks[0].transfer_seconds == 0 for outcome in outcomes.values())


@pytest.mark.parametrize("mesh", [Mesh(replicate=1, shard=MOST_RANKS_IN_FULL), Mesh(replicate=16, shard=1)])
def test_rank_0_stands_for_all_of_the_redundant_strategy(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    full = _compare(_model(40), mesh)["redundant"]
    monkeypatch.setattr("lightning_muon.cli.plan_strategies.MOST_RANKS_IN_FULL", 1)
    one = _compare(_model(40), mesh)["redundant"]
    # It packs its pieces once for all others, where a full simulation packs them for each.
    assert one.timeline.makespan == pytest.approx(full.timeline.makespan, rel=0.01)
    assert one.timeline.idle == pytest.approx(full.timeline.idle, abs=0.01)
    assert one.timeline.hidden == pytest.approx(full.timeline.hidden, abs=0.01)
    assert one.loads == full.loads
    assert one.note.startswith("rank 0 of 16 was simulated")


def test_too_many_buckets_become_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_muon.cli.plan_strategies._MOST_OPS", 1)
    outcomes = _compare(_model(200), Mesh(replicate=1, shard=2), replace(_OPTIONS, chunk_bytes=1))
    assert outcomes["lpt"].num_buckets <= 9
    assert "smaller ones are too many to simulate" in outcomes["lpt"].note
    experts = _compare(_model(50, kind="stack"), Mesh(replicate=1, shard=2), replace(_OPTIONS, chunk_bytes=1))
    assert experts["lpt"].num_buckets <= 9


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
    specs = _compare(_model(3), Mesh(replicate=1, shard=2))["lpt"].ranks.specs
    one = newton_schulz_flops(256, 128, 5)
    assert lower_bound(specs, 2) == 1.5 * one
    assert lower_bound(specs, 100) == one


def test_what_cannot_leave_its_rank_bounds_the_load() -> None:
    # Of each stack of 4 matrices the first two of 3 ranks have 2 each and the last has none.
    outcome = _compare(_model(5, kind="stack"), Mesh(replicate=1, shard=3))["lpt"]
    assert outcome.lower_bound == 10 * newton_schulz_flops(256, 128, 5)
    assert outcome.loads[2] == 0


def test_costs_are_those_of_newton_schulz_and_adamw() -> None:
    parameters = (
        ParameterShape(name="a", shape=(10, 4), kind="matrix"),
        ParameterShape(name="frozen", shape=(10, 4), kind="matrix", frozen=True),
        ParameterShape(name="bias", shape=(10,), kind="elementwise"),
        ParameterShape(name="scale", shape=(), kind="elementwise"),
    )
    model = ModelShapes(name="model", source="", parameters=parameters)
    ranks = _compare(model, Mesh(replicate=1, shard=4), replace(_OPTIONS, ns_steps=3))["lpt"].ranks
    assert [(spec.name, spec.held, spec.flops) for spec in ranks.specs] == [
        ("a", (12, 12, 12, 4), newton_schulz_flops(10, 4, 3))
    ]
    # Rows of the bias: 3, 3, 3, 1; the scalar lies on the first rank. 28 bytes move for each element.
    assert ranks.adamw_bytes == (28 * 4, 28 * 3, 28 * 3, 28)


def test_an_error_says_when_buckets_cannot_be_smaller() -> None:
    few, mesh = replace(_OPTIONS, buffer_bytes=1000, chunk_bytes=1), Mesh(replicate=1, shard=4)
    with pytest.raises(ValueError, match=r"at least 1 matrices .* --chunk-bytes does not help .* with --fused"):
        _compare(_model(64), mesh, few)
    with pytest.raises(ValueError, match=r"lower chunk_bytes$"):
        _compare(_model(64), mesh, replace(few, chunk_bytes=2**20))


def test_buckets_are_told_by_the_bytes_of_an_owner() -> None:
    outcomes = _compare(_model(9), Mesh(replicate=1, shard=4))
    one = 256 * 128 * 2
    assert outcomes[PIPELINE].bucket_bytes == (one, one, one)
    assert outcomes[PIPELINE].num_buckets == 3
    assert outcomes["redundant"].bucket_bytes == (one,) * 9


def test_newton_schulz_keeps_two_iterates_and_two_products() -> None:
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


# Square matrices: on CUDA sharing pays from a side of about 1,000 on, with many of them (schedule/estimates.py).
_LARGE, _SMALL = 4096, 64


def _choice(mesh: Mesh, *sides: int, **options: Any) -> Any:
    shapes = [ParameterShape(name=f"w{i}", shape=(side, side), kind="matrix") for i, side in enumerate(sides)]
    model = ModelShapes(name="m", source="", parameters=tuple(shapes))
    return choice_of(MuonConfig(**options), model, mesh, _OPTIONS)


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({}, PIPELINE),
        ({"overlap": "step"}, PIPELINE),
        ({"overlap": "off"}, "lpt"),
        ({"assignment": "round_robin", "overlap": "off"}, "round_robin"),
        ({"assignment": "round_robin"}, None),
        ({"assignment": "redundant"}, "redundant"),
        ({"assignment": "redundant", "overlap": "off"}, None),
    ],
)
def test_without_replicas_assignment_and_overlap_name_the_row(options: dict[str, Any], row: str | None) -> None:
    choice = _choice(Mesh(replicate=1, shard=2), *[_LARGE] * 8, **options)
    assert choice.row == row
    assert choice.num_shared is None
    assert "(no replicas)" in choice.to_text()
    assert ("none of these rows" if row is None else f"the row {row!r}") in choice.to_text()


@pytest.mark.parametrize(
    ("sides", "options", "num_shared", "row"),
    [
        ([_LARGE] * 64, {}, 64, GRID),
        ([_SMALL] * 64, {}, 0, PIPELINE),
        ([_LARGE] * 40 + [_SMALL] * 24, {}, 40, None),
        ([_LARGE] * 64, {"dedupe": "never"}, 0, PIPELINE),
        ([_SMALL] * 64, {"dedupe": "always"}, 64, GRID),
        ([_LARGE] * 64, {"overlap": "off"}, 64, None),
        ([_SMALL] * 64, {"overlap": "off"}, 0, "lpt"),
    ],
)
def test_with_replicas_of_shards_dedupe_decides(
    sides: list[int], options: dict[str, Any], num_shared: int, row: str | None
) -> None:
    choice = _choice(Mesh(replicate=2, shard=2), *sides, **options)
    assert (choice.num_shared, choice.row) == (num_shared, row)
    assert f"replicas share {num_shared} of 64 matrices" in choice.to_text()
    assert choice.to_dict()["num_shared"] == num_shared


def test_replicas_without_shards_compute_all_or_divide_it() -> None:
    mesh = Mesh(replicate=2, shard=1)
    assert _choice(mesh, *[_SMALL] * 8).row == "redundant"
    assert _choice(mesh, *[_LARGE] * 8).row == PIPELINE
    assert _choice(mesh, *[_LARGE] * 8, _SMALL).row is None


@pytest.mark.parametrize(
    ("wire", "compute", "expected"),
    [
        ("auto", "auto", 2),
        ("auto", "float32", 4),
        ("auto", "bfloat16", 2),
        ("float32", "bfloat16", 4),
        ("bfloat16", "float32", 2),
    ],
)
def test_elements_travel_in_the_wire_or_compute_dtype(wire: Any, compute: Any, expected: int) -> None:
    assert wire_itemsize(MuonConfig(wire_dtype=wire, compute_dtype=compute)) == expected
