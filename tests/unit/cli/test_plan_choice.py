"""The row of the tables that a config runs."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_muon.cli.plan_choice import choice_of, wire_itemsize
from lightning_muon.cli.plan_specs import Mesh, exchange_ranks
from lightning_muon.cli.plan_strategies import GRID, PIPELINE
from lightning_muon.config import MuonConfig
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape

# Square matrices: on CUDA sharing pays from a side of about 1,000 on, with many of them (schedule/estimates.py).
_LARGE, _SMALL = 4096, 64


def _choice(mesh: Mesh, *sides: int, **options: Any) -> Any:
    shapes = [ParameterShape(name=f"w{i}", shape=(side, side), kind="matrix") for i, side in enumerate(sides)]
    model = ModelShapes(name="m", source="", parameters=tuple(shapes))
    ranks = exchange_ranks(model, mesh, ns_steps=5, is_grid=False)
    return choice_of(MuonConfig(**options), ranks, mesh, itemsize=2)


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
def test_elements_travel_in_the_wire_dtype_or_that_of_newton_schulz(wire: Any, compute: Any, expected: int) -> None:
    assert wire_itemsize(MuonConfig(wire_dtype=wire, compute_dtype=compute)) == expected
