"""Routes of the parameters of an optimizer, from its module if it has one, and its groups' ``algorithm``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_muon.params.routing import Route, route_by_shape, route_module


def routes_of(
    groups: Sequence[dict[str, Any]],
    module: nn.Module | None,
    *,
    adamw_patterns: Sequence[str],
    muon_patterns: Sequence[str],
    fused: Mapping[str, int | tuple[int, ...]] | None,
) -> dict[Tensor, Route]:
    """One route for every parameter of ``groups``.

    Raises:
        ValueError: If a group with ``algorithm="muon"`` has a parameter that is no matrix, or a pattern is wrong.
    """
    known: dict[Tensor, Route] = {}
    if module is not None:
        by_name = route_module(module, adamw_patterns=adamw_patterns, muon_patterns=muon_patterns, fused=fused)
        known = dict(zip(module.parameters(), by_name.values(), strict=True))
    routes: dict[Tensor, Route] = {}
    for group in groups:
        names = group.get("param_names") or [f"parameter {len(routes) + i}" for i in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            route = known.get(parameter) or route_by_shape(name, tuple(parameter.shape))
            routes[parameter] = _forced(route, group["algorithm"], tuple(parameter.shape))
    return routes


def _forced(route: Route, algorithm: str, shape: tuple[int, ...]) -> Route:
    """The route after a group's own choice of the algorithm."""
    if algorithm in ("auto", route.algorithm):
        return route
    reason = f"algorithm={algorithm!r}"
    if algorithm == "adamw":
        return replace(route, kind="elementwise", reason=reason, splits=())
    by_shape = route_by_shape(route.name, shape)
    if by_shape.kind == "elementwise":
        raise ValueError(
            f"{route.name} {shape} is in a group with algorithm='muon', but Muon takes matrices only; move it to a "
            "group with algorithm='auto' or 'adamw'"
        )
    return replace(by_shape, reason=reason)
