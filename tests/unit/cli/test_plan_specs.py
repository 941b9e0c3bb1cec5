"""What each rank holds, compared with DTensor's own rule."""

from __future__ import annotations

import math

import pytest
from torch.distributed.tensor import Shard

from lightning_muon.cli.plan_specs import Mesh, exchange_ranks, with_fused, with_stacks_cut_along
from lightning_muon.math.newton_schulz import newton_schulz_flops
from lightning_muon.params.layout import held_boxes
from lightning_muon.params.logical import logical_matrices
from lightning_muon.params.routing import Route
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape


def _model(*parameters: ParameterShape) -> ModelShapes:
    return ModelShapes(name="model", source="", parameters=parameters)


def _matrix(name: str, *shape: int, **other: object) -> ParameterShape:
    return ParameterShape(name=name, shape=shape, **{"kind": "matrix", **other})  # type: ignore[arg-type]


def _held_by_dtensor(parameter: ParameterShape, shard: int) -> list[tuple[int, ...]]:
    coordinates = [(rank,) for rank in range(shard)]
    boxes = held_boxes(parameter.shape, (shard,), [Shard(parameter.shard_dim)], coordinates)
    route = Route(name=parameter.name, kind=parameter.kind, reason="", splits=parameter.splits)  # type: ignore[arg-type]
    matrices = logical_matrices(parameter.shape, route)
    return [tuple(matrix.box.intersect(box).numel for box in boxes) for matrix in matrices]


@pytest.mark.parametrize("shard", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize(
    "parameter",
    [
        _matrix("even", 8, 4),
        _matrix("uneven", 13, 7),
        _matrix("fewer rows than ranks", 1, 9),
        _matrix("fused", 12, 5, splits=(3, 4, 5)),
        _matrix("columns", 6, 10, shard_dim=1),
        _matrix("experts", 5, 3, 4, kind="stack"),
        _matrix("experts by rows", 2, 9, 4, kind="stack", shard_dim=1),
    ],
    ids=lambda parameter: parameter.name,
)
def test_ranks_hold_what_dtensor_gives_them(parameter: ParameterShape, shard: int) -> None:
    ranks = exchange_ranks(_model(parameter), Mesh(replicate=1, shard=shard), ns_steps=5, is_grid=False)
    assert [spec.held for spec in ranks.specs] == _held_by_dtensor(parameter, shard)
    assert all(sum(spec.held) == spec.numel == spec.rows * spec.cols for spec in ranks.specs)


def test_a_grid_repeats_the_shards_in_each_replica() -> None:
    model, mesh = _model(_matrix("a", 13, 7)), Mesh(replicate=3, shard=2)
    grid = exchange_ranks(model, mesh, ns_steps=5, is_grid=True)
    assert grid.specs[0].held == (49, 42, 49, 42, 49, 42)
    assert grid.replica_of == (0, 0, 1, 1, 2, 2)
    alone = exchange_ranks(model, mesh, ns_steps=5, is_grid=False)
    assert alone.specs[0].held == (49, 42)
    assert alone.replica_of == (0, 0)


def test_equal_shapes_share_one_tuple_so_that_thousands_of_ranks_stay_cheap() -> None:
    model = _model(_matrix("a", 64, 8), _matrix("b", 64, 8))
    first, second = exchange_ranks(model, Mesh(replicate=1, shard=4096), ns_steps=5, is_grid=False).specs
    assert first.held is second.held


def test_costs_are_those_of_newton_schulz_and_adamw() -> None:
    model = _model(
        _matrix("a", 10, 4),
        _matrix("frozen", 10, 4, frozen=True),
        ParameterShape(name="bias", shape=(10,), kind="elementwise"),
        ParameterShape(name="scale", shape=(), kind="elementwise"),
    )
    ranks = exchange_ranks(model, Mesh(replicate=1, shard=4), ns_steps=3, is_grid=False)
    assert [(spec.name, spec.flops) for spec in ranks.specs] == [("a", newton_schulz_flops(10, 4, 3))]
    # Rows of the bias: 3, 3, 3, 1; the scalar lies on the first rank. 28 bytes move for each element.
    assert ranks.adamw_bytes == (28 * 4, 28 * 3, 28 * 3, 28)


def test_fused_patterns_divide_weights_evenly_or_by_sizes() -> None:
    model = _model(_matrix("l.0.qkv", 12, 4), _matrix("l.0.gate_up", 8, 4), _matrix("l.0.down", 4, 4))
    fused = with_fused(model, {"*qkv": (6, 3, 3), "*gate_up": (2,)})
    assert [parameter.splits for parameter in fused.parameters] == [(6, 3, 3), (4, 4), ()]
    ranks = exchange_ranks(fused, Mesh(replicate=1, shard=2), ns_steps=5, is_grid=False)
    assert [spec.name for spec in ranks.specs] == [
        *("l.0.qkv[0]", "l.0.qkv[1]", "l.0.qkv[2]", "l.0.gate_up[0]", "l.0.gate_up[1]", "l.0.down")
    ]
    assert sum(spec.numel for spec in ranks.specs) == sum(math.prod(p.shape) for p in model.parameters)


def test_patterns_that_fit_nothing_are_refused() -> None:
    model = _model(_matrix("a", 10, 4))
    with pytest.raises(ValueError, match="'b' matches no matrix of model"):
        with_fused(model, {"b": (2,)})
    with pytest.raises(ValueError, match=r"a \(10, 4\) cannot be divided into 3 equal parts"):
        with_fused(model, {"a": (3,)})
    with pytest.raises(ValueError, match="do not sum to dimension 0"):
        with_fused(model, {"a": (3, 3)})
    with pytest.raises(ValueError, match="model has no stacks"):
        with_stacks_cut_along(model, 1)


def test_stacks_can_be_cut_along_rows() -> None:
    model = with_stacks_cut_along(_model(_matrix("a", 8, 4), _matrix("e", 2, 8, 4, kind="stack")), 1)
    assert [parameter.shard_dim for parameter in model.parameters] == [0, 1]
