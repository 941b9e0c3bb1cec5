"""Routes of the parameters of an optimizer, from its module if it has one, and its groups' ``algorithm``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_muon.optim.matrix_step import States
from lightning_muon.optim.state import state_keys
from lightning_muon.optim.step_plan import BoundParameter
from lightning_muon.params.routing import Route, route_by_shape, route_module, route_named


class KnownRoutes:
    """Routes that were found once, until a framework swaps parameters or a group gets another ``algorithm``."""

    def __init__(self) -> None:
        # With the algorithm of the group that each was found for.
        self._found: dict[Tensor, tuple[str, Route]] = {}

    def __getitem__(self, parameter: Tensor) -> Route:
        """The route of one of the parameters of the last :meth:`update`."""
        return self._found[parameter][1]

    def update(
        self, groups: Sequence[dict[str, Any]], module: nn.Module | None, states: States, **patterns: Any
    ) -> bool:
        """Look for what is not known, and return whether there was any; arguments and errors as in :func:`routes_of`.

        State of parameters that are not there any more is dropped, which torch could not save, and what is left of
        another algorithm.
        """
        current = {param: group["algorithm"] for group in groups for param in group["params"]}
        known = {p: self._found[p] for p, now in current.items() if p in self._found and self._found[p][0] == now}
        if len(known) == len(current):
            return False
        routes = routes_of(groups, module, **patterns)
        before, self._found = self._found, {p: known.get(p) or (now, routes[p]) for p, now in current.items()}
        for param in [param for param in states if param not in current]:
            del states[param]
        for param in before.keys() & current.keys() & states.keys():
            for key in state_keys(before[param][1].algorithm) - state_keys(self[param].algorithm):
                states[param].pop(key, None)
        return True


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
        RuntimeError: If the module holds unsharded weights.
        ValueError: If a group with ``algorithm="muon"`` has a parameter that is no matrix, or a pattern is wrong.
    """
    patterns = {"adamw_patterns": adamw_patterns, "muon_patterns": muon_patterns, "fused": fused}
    if module is not None:
        known = dict(zip(module.parameters(), route_module(module, **patterns).values(), strict=True))
        _refuse_unsharded(groups, known)
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


def _refuse_unsharded(groups: Sequence[dict[str, Any]], known: Mapping[Tensor, Route]) -> None:
    """Raise if the module shows whole weights where the optimizer has the shards of FSDP2."""
    strangers = [p for group in groups for p in group["params"] if isinstance(p, DTensor) and p not in known]
    if strangers:
        raise RuntimeError(
            f"{len(strangers)} sharded parameters of the optimizer, the first of shape {tuple(strangers[0].shape)}, "
            "are not in its module, which holds whole weights now (FSDP2: after forward, or after an evaluation). Call "
            "module.reshard() first, or pass the module to ParallelMuon right after fully_shard"
        )


def _named_parameters(groups: Sequence[dict[str, Any]]) -> dict[str, nn.Parameter]:
    """Parameters by the names that the user gave, or by their position."""
    named: dict[str, nn.Parameter] = {}
    for group in groups:
        names = group.get("param_names") or [f"parameter {len(named) + i}" for i in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            if named.setdefault(name, parameter) is not parameter:
                raise ValueError(
                    f"two parameters have the name {name!r}; put the module's name in front: 'encoder.{name}'"
                )
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


def check_memory(parameters: Sequence[BoundParameter]) -> None:
    """Raise ``ValueError`` for a parameter with several elements in one place in memory, as ``expand`` makes it."""
    for parameter in parameters:
        local = parameter.local
        if any(stride == 0 and size > 1 for size, stride in zip(local.shape, local.stride(), strict=True)):
            raise ValueError(
                f"{parameter.route.name} {tuple(local.shape)} has strides {local.stride()}: several of its elements "
                "are one place in memory, which cannot be updated in place; make it with .contiguous() or .clone()"
            )


def warn_of_frozen_gradients(parameters: Sequence[BoundParameter]) -> None:
    """Say once per plan, on rank 0, that the gradients of frozen parameters are not applied."""
    found = [p.route.name for p in parameters if not p.tensor.requires_grad and p.tensor.grad is not None]
    if found and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(
            f"{len(found)} parameters ({found[0]}, ...) have requires_grad=False and a gradient, which is not applied; "
            "set requires_grad=True to train them, or grad=None",
            stacklevel=4,
        )


def warn_of_shapes(parameters: Sequence[BoundParameter]) -> None:
    """Say once per plan, on rank 0, that embeddings and heads cannot be told from matrices without their module."""
    guessed = [p.route.name for p in parameters if p.group["algorithm"] == "auto" and p.route.algorithm == "muon"]
    if guessed and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(
            f"{len(guessed)} parameters ({guessed[0]}, ...) are routed to Muon by their shape alone, embeddings "
            "and output heads among them; pass the module, call optimizer.attach(module), or set algorithm= per group",
            stacklevel=4,
        )
