"""Strategies side by side: loads, bytes and times, compared with what can be computed by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_strategies import (
    GRID,
    MOST_RANKS_IN_FULL,
    PIPELINE,
    Outcome,
    Setting,
    choice_of,
    compare_strategies,
)
from lightning_muon.config import MuonConfig
from lightning_muon.schedule.cost import PRESETS
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape
from tests.reference.muon import newton_schulz_flops

_CONFIG = MuonConfig(chunk_bytes=2**16)
_MODULE = "lightning_muon.cli.plan_strategies"
_NUMEL = 256 * 128
_FLOPS = newton_schulz_flops(256, 128, 5)


def _setting(parameters: Sequence[ParameterShape], replicate: int, shard: int, config: MuonConfig = _CONFIG) -> Setting:
    model = ModelShapes(name="model", source="", parameters=tuple(parameters))
    mesh = Mesh(replicate=replicate, shard=shard)
    return Setting(model=model, mesh=mesh, config=config, wire_itemsize=2, cost=PRESETS["reference"])


def _compare(
    count: int, replicate: int, shard: int, config: MuonConfig = _CONFIG, kind: str = "matrix"
) -> dict[str, Outcome]:
    """Of so many 256 x 128 matrices, or stacks of four."""
    shape = (256, 128) if kind == "matrix" else (4, 256, 128)
    matrices = [ParameterShape(name=f"m.{i}", shape=shape, kind=kind) for i in range(count)]
    bias = ParameterShape(name="bias", shape=(64,), kind="elementwise")
    setting = _setting((*matrices, bias), replicate, shard, config)
    return {each.name: each for each in compare_strategies(setting)}


def _moved(outcome: Outcome) -> dict[tuple[str, str], int]:
    """Bytes by direction and axis."""
    return {(each["direction"], each["axis"].split()[0]): each["total"] for each in outcome.numbers["bytes"]}


def test_equal_matrices_are_divided_or_computed_everywhere() -> None:
    outcomes = _compare(16, 1, 4)
    assert list(outcomes) == ["redundant", "round_robin", "lpt", PIPELINE]
    assert outcomes["lpt"].plan.flops == (4 * _FLOPS,) * 4
    assert outcomes["redundant"].plan.flops == (16 * _FLOPS,) * 4
    assert outcomes["lpt"].numbers["load"]["bound_flops"] == 4 * _FLOPS
    # Matrices move once each way, but for the owner's part.
    floor = 16 * _NUMEL * 3 // 4 * 2
    for name in ("round_robin", "lpt", PIPELINE):
        assert _moved(outcomes[name]) == {("gather", "within"): floor, ("scatter", "within"): floor}
    assert _moved(outcomes["redundant"]) == {("gather", "within"): 4 * floor}


def test_the_owner_grid_removes_the_work_that_replicas_repeat() -> None:
    outcomes = _compare(16, 2, 2)
    assert max(outcomes[PIPELINE].plan.flops) == 2 * max(outcomes[GRID].plan.flops)
    assert len(outcomes[GRID].plan.flops) == 4
    # Halves within a replica, and the other replica gets every update once.
    moved = _moved(outcomes[GRID])
    assert (moved["scatter", "within"], moved["scatter", "between"]) == (16 * _NUMEL, 16 * _NUMEL * 2)


def test_replicas_without_shards_gather_nothing() -> None:
    outcomes = _compare(16, 4, 1)
    assert GRID not in outcomes
    assert max(outcomes["lpt"].plan.flops) * 4 == sum(outcomes["lpt"].plan.flops)
    assert list(_moved(outcomes["lpt"])) == [("scatter", "between")]
    assert not _moved(outcomes["redundant"])
    # One rank alone moves nothing.
    assert all(each.timeline.ranks[0].transfer_seconds == 0 for each in _compare(16, 1, 1).values())


@pytest.mark.parametrize(("replicate", "shard"), [(1, MOST_RANKS_IN_FULL), (16, 1)])
def test_many_ranks_are_simulated_by_few(replicate: int, shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    full = _compare(40, replicate, shard)
    monkeypatch.setattr(f"{_MODULE}.MOST_RANKS_IN_FULL", 1)
    for name, few in _compare(40, replicate, shard).items():
        # A mean over ranks, in another order of sums.
        assert few.numbers["idle"] == pytest.approx(full[name].numbers["idle"], abs=1e-12)
        assert few.numbers | {"idle": 0.0} == full[name].numbers | {"idle": 0.0}


def test_too_many_buckets_become_larger_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{_MODULE}._MOST_OPS", 1)
    for count, kind in ((200, "matrix"), (50, "stack")):
        numbers = _compare(count, 1, 2, MuonConfig(chunk_bytes=1), kind)["lpt"].numbers
        assert numbers["num_buckets"] <= 9
        assert "smaller ones are too many to simulate" in numbers["note"]


def test_experts_on_one_rank_stay_there_and_bound_the_load() -> None:
    outcome = _compare(3, 1, 2, kind="stack")["lpt"]
    assert outcome.plan.owners == ((0,), (0,), (1,), (1,)) * 3
    assert not _moved(outcome)
    # Of each stack of 4 matrices the first two of 3 ranks have 2 each and the last has none.
    outcome = _compare(5, 1, 3, kind="stack")["lpt"]
    assert outcome.numbers["load"]["bound_flops"] == 10 * _FLOPS
    assert outcome.plan.flops[2] == 0
    # The bound of matrices that travel is the mean or the dearest one.
    for shard, bound in ((2, 1.5 * _FLOPS), (100, _FLOPS)):
        assert _compare(3, 1, shard)["lpt"].numbers["load"]["bound_flops"] == bound
    with pytest.raises(ValueError, match="model has no matrices that are trained"):
        _compare(0, 1, 2)


def test_costs_are_those_of_newton_schulz_and_adamw() -> None:
    parameters = (
        ParameterShape(name="a", shape=(10, 4), kind="matrix"),
        ParameterShape(name="frozen", shape=(10, 4), kind="matrix", frozen=True),
        ParameterShape(name="bias", shape=(10,), kind="elementwise"),
        ParameterShape(name="scale", shape=(), kind="elementwise"),
    )
    outcome = compare_strategies(_setting(parameters, 1, 4, MuonConfig(ns_steps=3)))[2]
    assert [(spec.name, spec.shards.held, spec.flops) for spec in outcome.specs] == [
        ("a", (12, 12, 12, 4), newton_schulz_flops(10, 4, 3))
    ]
    # Rows of the bias: 3, 3, 3, 1; the scalar lies on the first rank. 28 bytes move for each element.
    adamw = [
        next(span.op.bytes for span in spans if span.op.kind == "adamw") for spans in outcome.timeline.spans.values()
    ]
    assert adamw == [28 * 4, 28 * 3, 28 * 3, 28]


# Square matrices: on CUDA sharing pays from a side of about 1,000 on, with many of them (schedule/assign.py).
_LARGE, _SMALL = 4096, 64


@pytest.mark.parametrize(
    ("replicate", "shard", "sides", "options", "num_shared", "row"),
    [
        # Without replicas assignment and overlap name the row.
        (1, 2, [_LARGE] * 8, {}, None, PIPELINE),
        (1, 2, [_LARGE] * 8, {"overlap": "off"}, None, "lpt"),
        (1, 2, [_LARGE] * 8, {"assignment": "round_robin", "overlap": "off"}, None, "round_robin"),
        (1, 2, [_LARGE] * 8, {"assignment": "redundant"}, None, "redundant"),
        (1, 2, [_LARGE] * 8, {"assignment": "redundant", "overlap": "off"}, None, None),
        # With replicas dedupe decides.
        (2, 2, [_LARGE] * 64, {}, 64, GRID),
        (2, 2, [_SMALL] * 64, {}, 0, PIPELINE),
        (2, 2, [_LARGE] * 40 + [_SMALL] * 24, {}, 40, None),
        (2, 2, [_LARGE] * 64, {"dedupe": "never"}, 0, PIPELINE),
        (2, 2, [_SMALL] * 64, {"dedupe": "always"}, 64, GRID),
        (2, 2, [_LARGE] * 64, {"overlap": "off"}, 64, None),
        # Replicas without shards compute all or divide it.
        (2, 1, [_SMALL] * 8, {}, 0, "redundant"),
        (2, 1, [_LARGE] * 8, {}, 8, PIPELINE),
    ],
)
def test_a_config_is_the_row_that_shares_as_it_does(
    replicate: int, shard: int, sides: list[int], options: dict[str, Any], num_shared: int | None, row: str | None
) -> None:
    shapes = [ParameterShape(name=f"w{i}", shape=(side, side), kind="matrix") for i, side in enumerate(sides)]
    found = choice_of(_setting(shapes, replicate, shard, MuonConfig(**options)))
    assert (found["num_shared"], found["row"]) == (num_shared, row)
