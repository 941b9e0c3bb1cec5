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

from lightning_muon.config import OptimizerConfig
from lightning_muon.params.layers import (
    ParameterKind,
    Use,
    find_output_heads,
    is_transposed,
    layer_kind,
    parameter_uses,
)

_DEFAULTS = OptimizerConfig()
_WHOLE = "lightning_muon_routes"  # Attribute of a module: its routes, by name, from before it was cut into stages.
_TIED = "lightning_muon_tied"  # Attribute of a module: the other names of each parameter from before the cut.
# Layers, and MultiheadAttention.in_proj_weight, that hold Q, K and V, K and V, or gate and up one after the other.
_FUSED_NAME = re.compile(r"qkv|kv_proj|c_attn|gate_up_proj|^in_proj(_weight)?$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Route:
    """How the optimizer treats a parameter."""

    name: str  # Qualified name, without the parts that wrappers such as `torch.compile` add.
    # `"matrix"` (2-D), `"convolution"` (flattened to (dim 0, rest)), `"stack"` (all but the last two dimensions count
    # matrices) or `"elementwise"`.
    kind: ParameterKind
    reason: str = ""  # Short phrase for the table.
    # Sizes of fused sub-matrices (Q, K, V) along `split_dim`; empty if the weight is one matrix.
    splits: tuple[int, ...] = ()
    split_dim: int = 0  # 0, or 1 for layers that store (inputs, outputs).
    is_transposed: bool = False  # Whether the weight is stored as (inputs, outputs).

    @property
    def algorithm(self) -> Literal["muon", "adamw"]:
        """``"adamw"`` for elementwise parameters, ``"muon"`` for all others."""
        return "adamw" if self.kind == "elementwise" else "muon"


def route_module(module: nn.Module, options: OptimizerConfig = _DEFAULTS) -> dict[str, Route]:
    """One route for each distinct parameter of ``module``, in the order of ``module.named_parameters()``.

    It follows from layer type, ties and use. A parameter that an embedding or an output head uses anywhere
    is elementwise. The last linear layer counts as output head if nothing better is known, unless it is all that Muon
    would get: a model of one linear layer is a matrix, not a head. Only shapes are read, so parameters may lie on the
    meta device or be DTensors; frozen parameters are routed too.
    """
    places = parameter_uses(module)
    whole: Mapping[str, Route] = vars(module).get(_WHOLE, {})
    routes = [whole.get(route.name, route) for route in _route_all(module, places)]
    tied: Mapping[str, Sequence[str]] = vars(module).get(_TIED, {})
    every = [(*uses, *(replace(uses[0], name=name) for name in tied.get(uses[0].name, ()))) for uses in places]
    return _apply_patterns(routes, every, options, elsewhere=whole)


def keep_routes(module: nn.Module) -> None:
    """Store the routes of the whole ``module`` in it, so that its parameters keep them after a cut. Local.

    The last layer of a stage is no output head, a copy of a tied weight stays tied, and patterns may match
    parameters of other stages.
    """
    places = parameter_uses(module)
    routes = zip(_route_all(module, places), places, strict=True)
    vars(module)[_WHOLE] = {use.name: replace(route, name=use.name) for route, uses in routes for use in uses}
    vars(module)[_TIED] = {
        use.name: [other.name for other in uses if other is not use] for uses in places for use in uses
    }


def _route_all(module: nn.Module, places: Sequence[tuple[Use, ...]]) -> list[Route]:
    """Routes by the layers alone, without patterns."""
    known, guessed = find_output_heads(module)
    routes = [_route_parameter(uses, known) for uses in places]
    if guessed:
        with_guess = [
            replace(route, kind="elementwise", reason="output head (last layer registered)")
            if id(uses[0].parameter) in guessed and route.algorithm == "muon"
            else route
            for route, uses in zip(routes, places, strict=True)
        ]
        if any(route.algorithm == "muon" for route in with_guess):
            routes = with_guess
    return routes


def route_named(parameters: Mapping[str, nn.Parameter], options: OptimizerConfig = _DEFAULTS) -> dict[str, Route]:
    """Routes as in :func:`route_module`, but without a module: by shape, then by the patterns."""
    owner = nn.Module()
    places = [
        (Use(name=name, attribute=name.rsplit(".", 1)[-1], owner=owner, path=(("", owner),), parameter=parameter),)
        for name, parameter in parameters.items()
    ]
    routes = [route_by_shape(name, parameter.shape) for name, parameter in parameters.items()]
    return _apply_patterns(routes, places, options)


def route_by_shape(name: str, shape: Sequence[int]) -> Route:
    """The route of a parameter of which only the shape is known: 2-D matrix, 3-D stack, more convolution."""
    ndim = len(shape)
    kinds: dict[int, ParameterKind] = {0: "elementwise", 1: "elementwise", 2: "matrix", 3: "stack"}
    reason = f"stack of {shape[0]} matrices" if ndim == 3 else f"{ndim}-D"
    return Route(name=name, kind=kinds.get(ndim, "convolution"), reason=reason)


def require_muon(routes: Iterable[Route]) -> None:
    """Raise ``ValueError`` with all parameters and reasons if no route leads to Muon."""
    listed = list(routes)
    if not any(route.algorithm == "muon" for route in listed):
        lines = "\n".join(f"  {route.name}: {route.reason}" for route in listed)
        raise ValueError(
            f"None of the {len(listed)} parameters is routed to Muon:\n{lines}\n"
            "Name matrices in muon_patterns (for example muon_patterns=('head.weight',)), or use torch.optim.AdamW; "
            "a strategy keeps it by optimizer='keep', and FlexDeMoConfig(base='adamw') needs no matrices"
        )


def _route_parameter(uses: tuple[Use, ...], heads: Mapping[int, str]) -> Route:
    kinds = [layer_kind(use) for use in uses]
    kind, reason = kinds[0]
    head = heads.get(id(uses[0].parameter))
    if kind != "elementwise" and head is not None:
        kind, reason = "elementwise", head
    others = [use.name for use in uses[1:] if use.owner is not uses[0].owner]
    if others:
        blocking = next((i for i, (other, _) in enumerate(kinds) if other == "elementwise"), None)
        if kind == "elementwise" and blocking in (0, None):
            reason = f"{reason}, tied to {others[-1]}"
        elif blocking is not None:
            kind, reason = "elementwise", f"tied to {uses[blocking].name} ({kinds[blocking][1]})"
    inputs_first = is_transposed(uses[0])
    if inputs_first and kind != "elementwise":
        reason = f"{reason} (inputs, outputs)"
    return Route(name=uses[0].name, kind=kind, reason=reason, is_transposed=inputs_first)


def _apply_patterns(
    routes: list[Route],
    places: Sequence[tuple[Use, ...]],
    options: OptimizerConfig,
    elsewhere: Iterable[str] = (),
) -> dict[str, Route]:
    names = list(dict.fromkeys([*(use.name for uses in places for use in uses), *elsewhere]))
    for key in ("adamw_patterns", "muon_patterns", "fused", "fused_inputs"):
        for pattern in getattr(options, key):
            if not any(fnmatchcase(name, pattern) for name in names):
                nearest = ", ".join(difflib.get_close_matches(pattern, names, n=3, cutoff=0.0))
                raise ValueError(f"{key}: pattern {pattern!r} matches no parameter; the nearest names are {nearest}")
    routes = [_override(route, uses, options) for route, uses in zip(routes, places, strict=True)]
    for key in ("fused", "fused_inputs"):
        for pattern, parts in getattr(options, key).items():
            _declare_fused_(routes, places, key, pattern, parts)
    undeclared = [_first_match((*options.fused, *options.fused_inputs), uses) is None for uses in places]
    return {route.name: _ask_fused(route) if asks else route for route, asks in zip(routes, undeclared, strict=True)}


def _ask_fused(route: Route) -> Route:
    """The route, with the question "fused?" in its reason if the name suggests several matrices in one weight."""
    if route.kind != "matrix" or not _FUSED_NAME.search(route.name.removesuffix(".weight").rpartition(".")[2]):
        return route
    return replace(route, reason=f"{route.reason}; fused? see fused=")


def _override(route: Route, uses: tuple[Use, ...], options: OptimizerConfig) -> Route:
    to_adamw, to_muon = _first_match(options.adamw_patterns, uses), _first_match(options.muon_patterns, uses)
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


def _first_match(patterns: Iterable[str], uses: tuple[Use, ...]) -> str | None:
    return next((pattern for pattern in patterns if any(fnmatchcase(use.name, pattern) for use in uses)), None)


def _declare_fused_(
    routes: list[Route], places: Sequence[tuple[Use, ...]], key: str, pattern: str, parts: int | Sequence[int]
) -> None:
    matched = [i for i, uses in enumerate(places) if _first_match((pattern,), uses) is not None]
    # A pattern such as `*qkv*` also matches the bias, which has nothing to divide.
    matrices = [i for i in matched if routes[i].algorithm == "muon"]
    if matched and not matrices:
        names = ", ".join(routes[i].name for i in matched)
        raise ValueError(f"{key} pattern {pattern!r} matches only parameters that are not on Muon: {names}")
    for i in matrices:
        if routes[i].splits:
            raise ValueError(f"{routes[i].name} is matched by two patterns, the second is {key}: {pattern!r}")
        use = places[i][0]
        shape, dim = tuple(use.parameter.shape), int((key == "fused_inputs") != routes[i].is_transposed)
        where = f"{key}: {routes[i].name} {shape}"
        if routes[i].kind == "stack":
            raise ValueError(f"{where} is a stack of matrices already; leave it out of {key}")
        if isinstance(parts, int):
            if shape[dim] % parts != 0:
                raise ValueError(
                    f"{where} cannot be divided into {parts} equal parts along dim {dim} of size {shape[dim]}"
                )
            splits = (shape[dim] // parts,) * parts
        else:
            splits = tuple(parts)
            if sum(splits) != shape[dim]:
                raise ValueError(
                    f"{where} has size {shape[dim]} along dim {dim}, but the parts {splits} sum to {sum(splits)}"
                )
        if len(splits) > 1:
            reason = f"{routes[i].reason}, {len(splits)} fused"
            routes[i] = replace(routes[i], splits=splits, split_dim=dim, reason=reason)


_HEADER = ("parameter", "count", "shape", "optimizer", "reason", "frozen")
_TITLES = {"muon": "Muon", "adamw": "AdamW"}
# Route, global shape and "is frozen" of a parameter.
Row = tuple[Route, tuple[int, ...], bool]


def routing_table(rows: Sequence[Row]) -> str:
    """A plain-text table of all routes, with the totals below."""
    lines = routing_rows(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    rule = "-" * max(map(len, text))
    return "\n".join([text[0], rule, *text[1:], rule, *routing_totals(rows)])


def routing_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A header and a line for each route, numbered layers collapsed to ``*``."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        route, shape, frozen = row
        # A number inside a word (`norm1`) is part of a name and stays.
        name = ".".join("*" if part.isdigit() else part for part in route.name.split("."))
        groups.setdefault((name, shape, route.kind, re.sub(r"\d+", "*", route.reason), frozen), []).append(row)
    lines: list[tuple[str, ...]] = [_HEADER]
    for group in groups.values():
        route, shape, frozen = group[0]
        count = f"x{len(group)}" if len(group) > 1 else ""
        name, reason = _common([row[0].name for row in group]), _common([row[0].reason for row in group])
        lines.append((name, count, str(shape), _TITLES[route.algorithm], reason, "frozen" if frozen else ""))
    return lines


def routing_totals(rows: Sequence[Row]) -> list[str]:
    """Lines that say how many tensors and parameters each optimizer has."""
    sizes: dict[str, list[int]] = {title: [] for title in (*_TITLES.values(), "frozen")}
    for route, shape, frozen in rows:
        sizes["frozen" if frozen else _TITLES[route.algorithm]].append(math.prod(shape))
    total = max(sum(map(sum, sizes.values())), 1)
    return [
        f"{title}: {len(found)} tensors, {sum(found):,} parameters ({sum(found) / total:.1%})"
        for title, found in sizes.items()
        if found or title != "frozen"
    ]


def _common(texts: Sequence[str]) -> str:
    """Merge texts that differ in numbers only, with ``*`` for the numbers that differ."""
    # The separators are equal in all texts, so the numbers stand at the same odd positions.
    columns = zip(*(re.split(r"(\d+)", text) for text in texts), strict=True)
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)
