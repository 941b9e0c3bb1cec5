"""Routes of the parameters of an optimizer, from its module if it has one, and its groups' ``algorithm``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_muon.params.routing import Route, route_by_shape, route_module, route_named


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
    patterns = {"adamw_patterns": adamw_patterns, "muon_patterns": muon_patterns, "fused": fused}
    if module is not None:
        known = dict(zip(module.parameters(), route_module(module, **patterns).values(), strict=True))
    else:
        named = _named_parameters(groups)
        known = dict(zip(named.values(), route_named(named, **patterns).values(), strict=True))
    routes: dict[Tensor, Route] = {}
    for group in groups:
        for parameter in group["params"]:
            shape = tuple(parameter.shape)
            # A parameter that the module does not have (added by a callback, say) is routed by its shape.
            route = known.get(parameter) or route_by_shape(f"parameter {len(routes)}", shape)
            routes[parameter] = _forced(route, group["algorithm"], shape)
    return routes


def _named_parameters(groups: Sequence[dict[str, Any]]) -> dict[str, nn.Parameter]:
    """Parameters by the names that the user gave, or by their position."""
    named: dict[str, nn.Parameter] = {}
    for group in groups:
        names = group.get("param_names") or [f"parameter {len(named) + i}" for i in range(len(group["params"]))]
        named.update(zip(names, group["params"], strict=True))
    return named


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
