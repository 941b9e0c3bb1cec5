"""Numbers of a plan for machines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lightning_muon.cli.plan_data import gram_estimates, moved, plan_as_dict
from lightning_muon.cli.plan_specs import Mesh
from lightning_muon.cli.plan_strategies import GRID, PIPELINE, PlanOptions, compare_strategies
from lightning_muon.schedule.cost import PRESETS
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape

_OPTIONS = PlanOptions(
    ns_steps=5, wire_itemsize=2, chunk_bytes=2**16, look_ahead=3, buffer_bytes=None, cost=PRESETS["reference"]
)
_MODEL = ModelShapes(
    name="model",
    source="here",
    parameters=tuple(ParameterShape(name=f"m.{i}", shape=(64, 32), kind="matrix") for i in range(6)),
)


def test_the_dictionary_is_json_and_has_an_owner_for_each_matrix() -> None:
    mesh = Mesh(replicate=2, shard=2)
    outcomes = compare_strategies(_MODEL, mesh, _OPTIONS)
    plan = json.loads(json.dumps(plan_as_dict(_MODEL, mesh, _OPTIONS, outcomes)))
    assert plan["mesh"] == {"replicate": 2, "shard": 2, "ranks": 4}
    assert plan["model"]["matrices"] == [f"m.{i}" for i in range(6)]
    assert plan["model"]["parameters"][0]["algorithm"] == "muon"
    assert list(plan["strategies"]) == ["redundant", "round_robin", "lpt", PIPELINE, GRID]
    assert plan["strategies"]["redundant"]["owners"] == "all ranks"
    assert sorted(plan["strategies"][PIPELINE]["owners"]) == [0, 0, 0, 1, 1, 1]
    load = plan["strategies"][GRID]["load"]
    assert load["max_flops"] == max(load["flops_of_ranks"])
    assert load["max_over_bound"] == pytest.approx(load["max_flops"] / load["bound_flops"])
    assert plan["gram"] == []


def test_bytes_are_told_by_direction_and_axis_and_equal_the_floor() -> None:
    outcomes = {each.name: each for each in compare_strategies(_MODEL, Mesh(replicate=2, shard=2), _OPTIONS)}
    grid = moved(outcomes[GRID])
    assert [(each.direction, each.axis) for each in grid] == [
        ("gather", "within a replica"),
        ("scatter", "within a replica"),
        ("scatter", "between replicas"),
    ]
    assert all(each.total == each.floor for each in grid)
    (gather,) = moved(outcomes["redundant"])
    assert gather.total == 2 * gather.floor


def test_gram_variants_are_estimated_only_where_ranks_outnumber_matrices() -> None:
    few = compare_strategies(_MODEL, Mesh(replicate=1, shard=6), _OPTIONS)
    assert gram_estimates(few, _OPTIONS) == []
    many = compare_strategies(_MODEL, Mesh(replicate=1, shard=12), _OPTIONS)
    estimates = gram_estimates(many, _OPTIONS)
    assert [estimate.cost.name for estimate in estimates] == ["all-reduce", "owners", "groups of 2"]
    slower = replace(_OPTIONS, cost=replace(_OPTIONS.cost, bandwidth=(40e9, 20e9)))
    for one, other in zip(estimates, gram_estimates(many, slower), strict=True):
        assert one.compute_seconds == one.cost.flops / 150e12
        assert other.transfer_seconds == pytest.approx(2 * one.transfer_seconds)
        assert one.at_best == max(one.compute_seconds, one.transfer_seconds)
        assert one.at_worst == one.compute_seconds + one.transfer_seconds
