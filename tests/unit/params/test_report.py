"""The routing table."""

from __future__ import annotations

from torch import nn

from lightning_muon.params.report import routing_table
from lightning_muon.params.routing import route_module


def _table(module: nn.Module) -> str:
    routes = route_module(module).values()
    shapes = [(tuple(p.shape), not p.requires_grad) for p in module.parameters()]
    return routing_table([(route, shape, frozen) for route, (shape, frozen) in zip(routes, shapes, strict=True)])


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines()]


def test_repeated_layers_are_one_row_with_a_count() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(12))})
    rows = _rows(_table(model))
    assert ["blocks.*.0.weight", "x12", "(4,", "4)", "Muon", "Linear", "weight"] in rows
    assert ["blocks.*.0.bias", "x12", "(4,)", "AdamW", "1-D"] in rows


def test_different_shapes_kinds_and_frozen_layers_are_separate_rows() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6), nn.LayerNorm(6))
    model[1].requires_grad_(False)
    names = [row[0] for row in _rows(_table(model))]
    assert names[2:-4] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "*.bias", "3.weight"]
    assert "1.weight  " in _table(model) and "frozen" in next(
        line for line in _table(model).splitlines() if "1.weight" in line
    )


def test_numbers_inside_words_are_kept() -> None:
    table = _table(nn.ModuleDict({"norm1": nn.LayerNorm(4), "norm2": nn.LayerNorm(4), "a": nn.Linear(4, 4)}))
    assert "norm1.weight" in table
    assert "norm2.weight" in table


def test_totals_count_every_parameter_once() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    lines = _table(model).splitlines()
    assert lines[-3:] == [
        "Muon: 1 tensors, 36 parameters (41.9%)",
        "AdamW: 3 tensors, 20 parameters (23.3%)",
        "frozen: 2 tensors, 30 parameters (34.9%)",
    ]


def test_the_table_is_plain_ascii() -> None:
    assert _table(nn.Linear(2, 2)).isascii()
