"""Which parameters go to Muon and which to AdamW, and the table that says why."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from lightning_muon.config import check_fused
from lightning_muon.params.layers import Kind, OutputHeads, find_output_heads, is_transposed_linear, layer_kind
from lightning_muon.params.uses import Use, parameter_uses
from lightning_muon.schedule.shapes import ParameterShape


@dataclass(frozen=True, kw_only=True)
class Route:
    """What a parameter is to the optimizer."""

    name: str  # Qualified name, without the parts that wrappers such as `torch.compile` add.
    # `"matrix"` (2-D), `"convolution"` (flattened to (dim 0, rest)), `"stack"` (dim 0 counts matrices) or
    # `"elementwise"`.
    kind: Kind
    reason: str  # Short phrase for the table.
    splits: tuple[int, ...] = ()  # Sizes of fused sub-matrices along `split_dim`; empty if the weight is one matrix.
    split_dim: int = 0  # 0, or 1 for layers that store (inputs, outputs).

    @property
    def algorithm(self) -> Literal["muon", "adamw"]:
        """``"adamw"`` for elementwise parameters, ``"muon"`` for all others."""
        return "adamw" if self.kind == "elementwise" else "muon"


def route_module(
    module: nn.Module,
    *,
    adamw_patterns: Sequence[str] = (),
    muon_patterns: Sequence[str] = (),
    fused: Mapping[str, int | Sequence[int]] | None = None,
) -> dict[str, Route]:
    """Return one route for each distinct parameter of ``module``, in the order of ``module.named_parameters()``.

    Found by the type of the layer, by ties and by use. A parameter that an embedding or an output head uses anywhere
    is elementwise. The last linear layer counts as output head if nothing better is known, unless it is all that Muon
    would get: a model of one linear layer is a matrix, not a head. Only shapes are read, so parameters may lie on the
    meta device or be DTensors; frozen parameters are routed too.

    Args:
        module: The model; a LightningModule, compiled or sharded module as well.
        adamw_patterns: Shell patterns (``fnmatch``) of qualified names for AdamW.
        muon_patterns: Shell patterns of qualified names for Muon.
        fused: Pattern -> number of equal parts or sizes of the parts (Q, K, V) of a fused weight.

    Raises:
        ValueError: If a pattern matches nothing or contradicts another one, if a pattern sends a parameter with fewer
            than two dimensions to Muon, or if a fused weight cannot be divided as declared.
    """
    places = parameter_uses(module)
    routes = _routes_by_use(places, find_output_heads(module))
    return _apply_patterns(routes, places, adamw=adamw_patterns, muon=muon_patterns, fused=fused or {})


def route_named(
    parameters: Mapping[str, nn.Parameter],
    *,
    adamw_patterns: Sequence[str] = (),
    muon_patterns: Sequence[str] = (),
    fused: Mapping[str, int | Sequence[int]] | None = None,
) -> dict[str, Route]:
    """Return one route for each named parameter when no module is at hand: by shape, then by the patterns.

    Args and errors as in :func:`route_module`.
    """
    owner = nn.Module()
    places = [
        (Use(name=name, attribute=name.rsplit(".", 1)[-1], owner=owner, path=(("", owner),), parameter=parameter),)
        for name, parameter in parameters.items()
    ]
    routes = [route_by_shape(name, parameter.shape) for name, parameter in parameters.items()]
    return _apply_patterns(routes, places, adamw=adamw_patterns, muon=muon_patterns, fused=fused or {})


def _apply_patterns(
    routes: list[Route],
    places: Sequence[tuple[Use, ...]],
    *,
    adamw: Sequence[str],
    muon: Sequence[str],
    fused: Mapping[str, int | Sequence[int]],
) -> dict[str, Route]:
    names = [name for uses in places for name in _names(uses)]
    for key, patterns in (("adamw_patterns", adamw), ("muon_patterns", muon), ("fused", fused)):
        _check_patterns(key, patterns, names)
    check_fused(fused)
    routes = [_override(route, uses, adamw, muon) for route, uses in zip(routes, places, strict=True)]
    for pattern, parts in fused.items():
        routes = _declare_fused(routes, places, pattern, parts)
    return {route.name: route for route in routes}


def route_by_shape(name: str, shape: Sequence[int]) -> Route:
    """Return the route of a parameter of which only the shape is known: 2-D matrix, 3-D stack, more convolution."""
    ndim = len(shape)
    kinds: dict[int, Kind] = {0: "elementwise", 1: "elementwise", 2: "matrix", 3: "stack"}
    reason = f"stack of {shape[0]} matrices" if ndim == 3 else f"{ndim}-D"
    return Route(name=name, kind=kinds.get(ndim, "convolution"), reason=reason)


def route_of(parameter: ParameterShape) -> Route:
    """Return the route that a shape file gives a parameter."""
    return Route(
        name=parameter.name,
        kind=parameter.kind,  # type: ignore[arg-type]
        reason=parameter.reason,
        splits=parameter.splits,
        split_dim=parameter.split_dim,
    )


def require_muon(routes: Mapping[str, Route] | Iterable[Route]) -> None:
    """Raise ``ValueError`` with all parameters and reasons if no route leads to Muon."""
    listed = list(routes.values() if isinstance(routes, Mapping) else routes)
    if any(route.algorithm == "muon" for route in listed):
        return
    lines = "\n".join(f"  {route.name}: {route.reason}" for route in listed)
    raise ValueError(
        f"None of the {len(listed)} parameters is routed to Muon:\n{lines}\n"
        "Name matrices in muon_patterns (for example muon_patterns=('head.weight',)), or use torch.optim.AdamW"
    )


def _routes_by_use(places: Sequence[tuple[Use, ...]], heads: OutputHeads) -> list[Route]:
    routes = [_route_parameter(uses, heads.known) for uses in places]
    if heads.guessed is None:
        return routes
    with_guess = [
        replace(route, kind="elementwise", reason="output head (last layer)")
        if id(uses[0].parameter) == heads.guessed and route.algorithm == "muon"
        else route
        for route, uses in zip(routes, places, strict=True)
    ]
    return with_guess if any(route.algorithm == "muon" for route in with_guess) else routes


def _route_parameter(uses: tuple[Use, ...], heads: Mapping[int, str]) -> Route:
    name = uses[0].name
    verdicts = [layer_kind(use) for use in uses]
    kind, reason = verdicts[0]
    head = heads.get(id(uses[0].parameter))
    if kind != "elementwise" and head is not None:
        kind, reason = "elementwise", head
    others = [use.name for use in uses[1:] if use.owner is not uses[0].owner]
    if others:
        blocking = next((i for i, (other, _) in enumerate(verdicts) if other == "elementwise"), None)
        if kind == "elementwise" and blocking in (0, None):
            reason = f"{reason}, tied to {others[-1]}"
        elif blocking is not None:
            kind, reason = "elementwise", f"tied to {uses[blocking].name} ({verdicts[blocking][1]})"
    return Route(name=name, kind=kind, reason=reason)


def _override(route: Route, uses: tuple[Use, ...], adamw: Sequence[str], muon: Sequence[str]) -> Route:
    to_adamw, to_muon = _first_match(adamw, uses), _first_match(muon, uses)
    if to_adamw is not None and to_muon is not None:
        raise ValueError(
            f"{route.name} matches both adamw_patterns ({to_adamw!r}) and muon_patterns ({to_muon!r}); narrow one"
        )
    if to_adamw is not None:
        return replace(route, kind="elementwise", reason=f"adamw_patterns {to_adamw!r}")
    if to_muon is None:
        return route
    shape = tuple(uses[0].parameter.shape)
    if len(shape) < 2:
        raise ValueError(
            f"{route.name} {shape} matches muon_patterns {to_muon!r}, but Muon takes matrices only and this parameter "
            f"is {len(shape)}-D; narrow the pattern (for example to '*.weight')"
        )
    kind = route.kind if route.kind != "elementwise" else route_by_shape(route.name, shape).kind
    if isinstance(uses[0].owner, nn.Conv1d | nn.ConvTranspose1d):
        kind = "convolution"
    return replace(route, kind=kind, reason=f"muon_patterns {to_muon!r}")


def _declare_fused(
    routes: list[Route], places: Sequence[tuple[Use, ...]], pattern: str, parts: int | Sequence[int]
) -> list[Route]:
    matched = [i for i, uses in enumerate(places) if _first_match((pattern,), uses) is not None]
    # A pattern such as `*qkv*` also matches the bias, which has nothing to divide.
    matrices = [i for i in matched if routes[i].algorithm == "muon"]
    if not matrices:
        names = ", ".join(routes[i].name for i in matched)
        raise ValueError(f"fused pattern {pattern!r} matches only parameters that are not on Muon: {names}")
    result = list(routes)
    for i in matrices:
        if routes[i].splits:
            raise ValueError(f"{routes[i].name} is matched by two patterns of fused, the second is {pattern!r}")
        use = places[i][0]
        dim = 1 if is_transposed_linear(use.owner) else 0
        splits = _split_sizes(routes[i], tuple(use.parameter.shape), dim, parts)
        if len(splits) > 1:
            reason = f"{routes[i].reason}, {len(splits)} fused"
            result[i] = replace(routes[i], splits=splits, split_dim=dim, reason=reason)
    return result


def _split_sizes(route: Route, shape: tuple[int, ...], dim: int, parts: int | Sequence[int]) -> tuple[int, ...]:
    where = f"fused: {route.name} {shape}"
    if route.kind == "stack":
        raise ValueError(f"{where} is a stack of matrices already; leave it out of fused")
    size = shape[dim]
    if isinstance(parts, int):
        if size % parts != 0:
            raise ValueError(f"{where} cannot be divided into {parts} equal parts along dim {dim} of size {size}")
        return (size // parts,) * parts
    sizes = tuple(parts)
    if sum(sizes) != size:
        raise ValueError(f"{where} has size {size} along dim {dim}, but the parts {sizes} sum to {sum(sizes)}")
    return sizes


def _names(uses: tuple[Use, ...]) -> list[str]:
    return [use.name for use in uses]


def _first_match(patterns: Iterable[str], uses: tuple[Use, ...]) -> str | None:
    names = _names(uses)
    return next((pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)), None)


def _check_patterns(key: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    if isinstance(patterns, str):
        raise ValueError(f"{key} must be a sequence of patterns, got the string {patterns!r}; write ({patterns!r},)")
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
        raise ValueError(f"{key}: pattern {pattern!r} matches no parameter; the nearest names are {', '.join(nearest)}")


_HEADER = ("parameter", "count", "shape", "optimizer", "reason", "frozen")
_TITLES = {"muon": "Muon", "adamw": "AdamW"}
Row = tuple[Route, tuple[int, ...], bool]


def routing_table(rows: Sequence[Row]) -> str:
    """Return a plain-text table of all routes, numbered layers collapsed to ``*``, with the totals below.

    Args:
        rows: Route, global shape and "is frozen" of each parameter, in the order to show.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        route, shape, frozen = row
        key = (_layer_pattern(route.name), shape, route.kind, re.sub(r"\d+", "*", route.reason), frozen)
        groups.setdefault(key, []).append(row)
    lines = [_HEADER, *(_line(group) for group in groups.values())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    text = [_join(line, widths) for line in lines]
    rule = "-" * max(len(line) for line in text)
    return "\n".join([text[0], rule, *text[1:], rule, *_totals(rows)])


def _layer_pattern(name: str) -> str:
    """Replace the layer numbers; a number inside a word (``norm1``) is part of a name and stays."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _line(group: Sequence[Row]) -> tuple[str, ...]:
    route, shape, frozen = group[0]
    count = f"x{len(group)}" if len(group) > 1 else ""
    name = _common([row[0].name for row in group])
    reason = _common([row[0].reason for row in group])
    return (name, count, str(shape), _TITLES[route.algorithm], reason, "frozen" if frozen else "")


def _common(texts: Sequence[str]) -> str:
    """Return the texts, which differ in numbers only, as one with ``*`` for the numbers that differ."""
    # The separators are equal in all texts, so the numbers stand at the same odd positions.
    columns = zip(*(re.split(r"(\d+)", text) for text in texts), strict=True)
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)


def _join(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _totals(rows: Sequence[Row]) -> list[str]:
    elements: dict[str, list[int]] = {title: [] for title in (*_TITLES.values(), "frozen")}
    for route, shape, frozen in rows:
        elements["frozen" if frozen else _TITLES[route.algorithm]].append(math.prod(shape))
    total = sum(sum(sizes) for sizes in elements.values())
    return [
        f"{title}: {len(sizes)} tensors, {sum(sizes):,} parameters ({sum(sizes) / max(total, 1):.1%})"
        for title, sizes in elements.items()
        if sizes or title != "frozen"
    ]
