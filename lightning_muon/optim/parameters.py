"""What an optimizer knows of its parameters: hyper-parameters, routes, the meshes on which they live, and state."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import compress, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import gather, warn_on_first_rank
from lightning_muon.config import OptimizerConfig, check_hyperparameters, name_of_function
from lightning_muon.math.newton_schulz import as_tuples
from lightning_muon.params.layout import MeshMembers, PlacedState, RoutedParameter
from lightning_muon.params.matrices import neuron_dims, neuron_shape
from lightning_muon.params.routing import Route, route_by_shape, route_module, route_named

States = dict[Tensor, dict[str, Any]]
Gradients = MutableMapping[Tensor, Tensor]
ParamGroup = dict[str, Any]
# Keys of the state of a parameter.
ADAMW_STATE = frozenset({"step", "exp_avg", "exp_avg_sq"})
MOMENTUM = "momentum_buffer"
MUON_STATE = frozenset({MOMENTUM})
# State of NorMuon: float32, a value for each neuron of each matrix, sharded like the neurons.
SECOND_MOMENT = "second_momentum_buffer"
# Hyper-parameters of a param group that must be equal on all ranks.
COMPARED = (
    *("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "ns_quality"),
    *("orthogonalize", "adjust_lr_fn", "muon_lr_factor", "betas", "adamw_eps", "algorithm", "cautious_weight_decay"),
    *("normuon", "normuon_beta2"),
)
# Those that say how the update is made, which no scheduler changes.
_FAMILY = (
    *("nesterov", "ns_coefficients", "ns_steps", "ns_quality", "orthogonalize", "adjust_lr_fn"),
    *("muon_lr_factor", "cautious_weight_decay", "normuon", "normuon_beta2"),
)
# Those of which a loaded state cannot decide: which entries a state has, and code.
_OF_PROGRAM = ("normuon", "orthogonalize")
_SET_OPTIONS = "set others in optimizer.param_groups once the state is loaded (in on_train_start of a Trainer)"


class CheckedGroups:
    """Checks hyper-parameters of param groups, which users, schedulers and loaded states change at any time."""

    def __init__(self) -> None:
        self._right: list[tuple[Any, ...]] = []

    def check(self, groups: Sequence[ParamGroup]) -> None:
        """Raise ``ValueError`` for the first wrong value; values that passed before, or on a device, are not read."""
        for group, right in zip_longest(groups, self._right[: len(groups)]):
            values = tuple(map(group.get, COMPARED))
            if values != right or any(isinstance(each, Tensor) and each.device.type == "cpu" for each in values):
                check_group_(group)
        # After the corrections of check_group_().
        self._right = [tuple(map(group.get, COMPARED)) for group in groups]

    def are_right(self, groups: Sequence[ParamGroup]) -> bool:
        """Whether :meth:`check` raises nothing; local."""
        try:
            self.check(groups)
        except Exception:  # What is no number may raise anything when it is compared.
            return False
        return True


def hyperparameter_digest(groups: Sequence[ParamGroup]) -> int:
    """A hash of hyper-parameters, equal on ranks where they are, without those on a device; int32, not negative."""
    return zlib.crc32(repr([compared(group, waits=False) for group in groups]).encode()) >> 1


def compared(group: ParamGroup, *, waits: bool) -> dict[str, Any]:
    """Hyper-parameters that ranks compare, as Python numbers; those on a device are left out unless ``waits``."""
    values: dict[str, Any] = {}
    for key in COMPARED:
        value: Any = group.get(key)
        if waits or not isinstance(value, Tensor) or value.device.type == "cpu":
            values[key] = value if isinstance(value, int) or not hasattr(value, "__float__") else float(value)
    return as_saved(values)


def as_saved(group: Mapping[str, Any]) -> ParamGroup:
    """A copy of a param group, with the name of a function in place of it."""
    return {key: name_of_function(value) if callable(value) else value for key, value in group.items()}


def check_group_(group: ParamGroup) -> None:
    """Raise ``ValueError`` for a wrong or missing hyper-parameter; replace ``None``, lists and ``"auto"`` in place."""
    missing = sorted(set(COMPARED) - group.keys())
    if missing:
        raise ValueError(f"a param group has no {', '.join(missing)}; put back what was there when it was made")
    if group["adjust_lr_fn"] is None:
        group["adjust_lr_fn"] = "original"  # What None means to torch.optim.Muon.
    if group["muon_lr_factor"] == "auto":
        group["muon_lr_factor"] = 1.0
    for key in ("betas", "ns_coefficients"):
        if isinstance(group[key], list):
            group[key] = tuple(group[key])
    check_hyperparameters(group)


def completed_groups(saved: Sequence[ParamGroup], own: Sequence[ParamGroup], keys: Collection[str]) -> list[ParamGroup]:
    """Copies of saved param groups; those of ``keys`` that are missing in them are taken from ``own``.

    So are those of ``_OF_PROGRAM``, whatever was saved. Rank 0 warns of options in which the two differ.
    """
    groups = [dict(group) for group in saved]
    # Options that differ, as text: those where the saved value counts, and those where that of `own` does.
    from_saved, from_own = dict[str, str](), dict[str, str]()
    for group, before in zip(groups, own, strict=False):
        given = dict(group)
        group |= {key: before[key] for key in keys if key in before and key not in group}
        group |= {key: before[key] for key in _OF_PROGRAM if key in before}
        _check_loaded_group_(group, before)
        before = as_saved(before)
        for key in (key for key in _FAMILY if key in before):
            is_own = key in _OF_PROGRAM
            if as_tuples(given.get(key, before[key]) if is_own else group[key]) != as_tuples(before[key]):
                counts, other = (before, given) if is_own else (group, before)
                found = from_own if is_own else from_saved
                found.setdefault(key, f"{key}={counts[key]!r} (not {other[key]!r})")
    _warn_of_options(from_saved, from_own)
    return groups


def _check_loaded_group_(group: ParamGroup, own: ParamGroup) -> None:
    """Check as :func:`check_group_` does; the error names the loaded values that the program does not have."""
    try:
        check_group_(group)
    except ValueError as error:
        named = [key for key in COMPARED if key in re.findall(r"\w+", str(error)) and key in own]
        loaded = [f"{key}={group[key]!r}" for key in named if as_tuples(group[key]) != as_tuples(own[key])]
        if not loaded:
            raise
        raise ValueError(
            f"{error}. Of the loaded state: {', '.join(loaded)}, which outweighs the program. Make the optimizer with "
            f"options that go with that, and {_SET_OPTIONS}; or load only weights"
        ) from error


def _warn_of_options(from_saved: Mapping[str, str], from_own: Mapping[str, str]) -> None:
    """Warn on rank 0 which options were taken from the loaded state, and which from the program."""
    if not (from_saved or from_own):
        return
    parts = [f"the loaded state outweighs the program: {', '.join(from_saved.values())}"] if from_saved else []
    parts += [f"the program outweighs the loaded state: {', '.join(from_own.values())}"] if from_own else []
    warn_on_first_rank("; ".join([*parts, *([_SET_OPTIONS] if from_saved else [])]), stacklevel=5)


class KnownRoutes:
    """Routes that were found once, until a framework swaps parameters or a group gets another ``algorithm``."""

    def __init__(self, options: OptimizerConfig) -> None:
        self._options = options
        # With the algorithm of the group that each was found for.
        self._found: dict[Tensor, tuple[str, Route]] = {}

    def __getitem__(self, parameter: Tensor) -> Route:
        return self._found[parameter][1]

    def name(self, parameter: Tensor) -> str:
        """Name of a parameter; empty before its route is found."""
        return self[parameter].name if parameter in self._found else ""

    def forget(self) -> None:
        """Find all routes anew at the next :meth:`update`, which compares them with those of before; local."""
        self._found = {parameter: ("", route) for parameter, (_, route) in self._found.items()}

    def update(self, groups: Sequence[ParamGroup], module: nn.Module | None, states: States) -> bool:
        """Find routes that are not known, drop state that nobody needs, and return whether any route was missing."""
        current = {param: group["algorithm"] for group in groups for param in group["params"]}
        known = {p: self._found[p] for p, now in current.items() if p in self._found and self._found[p][0] == now}
        if len(known) == len(current):
            return False
        routes = routes_of(groups, module, self._options)
        before, self._found = self._found, {p: known.get(p) or (now, routes[p]) for p, now in current.items()}
        for param in [param for param in states if param not in current]:
            del states[param]
        for param in before.keys() & current.keys() & states.keys():
            shape, old, new = tuple(param.shape), before[param][1], self[param]
            if (neuron_shape(shape, old), neuron_dims(shape, old)) != (
                neuron_shape(shape, new),
                neuron_dims(shape, new),
            ):
                states[param].pop(SECOND_MOMENT, None)
        return True


def routes_of(groups: Sequence[ParamGroup], module: nn.Module | None, options: OptimizerConfig) -> dict[Tensor, Route]:
    """One route for every parameter of ``groups``."""
    known: dict[Tensor, Route]
    given = [p for group in groups for p in group["params"]]
    if any(isinstance(each, FlatParameter) for each in given) or (
        module is not None and any(isinstance(each, FullyShardedDataParallel) for each in module.modules())
    ):
        raise ValueError(
            "FullyShardedDataParallel (FSDP1) makes vectors of matrices, so there is nothing for Muon; shard the model "
            "with torch.distributed.fsdp.fully_shard (FSDP2) before the optimizer is made"
        )
    if module is None:
        named = _named_parameters(groups)
        known = dict(zip(named.values(), route_named(named, options).values(), strict=True))
    else:
        known = dict(zip(module.parameters(), route_module(module, options).values(), strict=True))
        strangers = [p for p in given if isinstance(p, DTensor) and p not in known]
        if strangers:
            raise RuntimeError(
                f"{len(strangers)} sharded parameters of the optimizer, the first of shape "
                f"{tuple(strangers[0].shape)}, are not in its module, which holds whole weights now (FSDP2: after "
                "forward, or after an evaluation). Call module.reshard() first, or pass the module to ParallelMuon "
                "right after fully_shard"
            )
    routes: dict[Tensor, Route] = {}
    for group in groups:
        for parameter in group["params"]:
            shape = tuple(parameter.shape)
            # A parameter that the module does not have (added by a callback, say) is routed by its shape.
            route = known.get(parameter) or route_by_shape(f"parameter {len(routes)}", shape)
            routes[parameter] = _forced(route, group["algorithm"], shape)
    return routes


def _named_parameters(groups: Sequence[ParamGroup]) -> dict[str, nn.Parameter]:
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
    """The route with the algorithm that its param group forces, unless ``adamw_patterns`` has chosen AdamW."""
    if algorithm in ("auto", route.algorithm) or route.reason.startswith("adamw_patterns"):
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
    return replace(by_shape, reason=f"{route.reason}, {reason}")


def warn_of_parameters(parameters: Sequence[RoutedParameter], *, has_module: bool) -> None:
    """Warn once per plan, on rank 0, of routes by shape alone and of frozen parameters with a gradient."""
    guessed = [p.route.name for p in parameters if p.group["algorithm"] == "auto" and p.route.algorithm == "muon"]
    if guessed and not has_module:
        warn_on_first_rank(
            f"{len(guessed)} parameters ({guessed[0]}, ...) are routed to Muon by their shape alone, embeddings "
            "and output heads among them; pass the module, call optimizer.attach(module), or set algorithm= per group",
            stacklevel=4,
        )
    frozen = [p.route.name for p in parameters if not p.tensor.requires_grad and p.tensor.grad is not None]
    if frozen:
        warn_on_first_rank(
            f"{len(frozen)} parameters ({frozen[0]}, ...) have requires_grad=False and a gradient, which is not "
            "applied; set requires_grad=True to train them, or grad=None",
            stacklevel=4,
        )


def state_keys(parameter: RoutedParameter) -> frozenset[str]:
    """Keys of :func:`zero_state`."""
    if parameter.route.algorithm == "adamw":
        return ADAMW_STATE
    return MUON_STATE | {SECOND_MOMENT} if parameter.group.get("normuon", False) else MUON_STATE


def zero_state(parameter: RoutedParameter) -> dict[str, Any]:
    """State of a parameter before its first step, laid out like it; AdamW's has the keys of torch. Local."""
    tensor, route, layout = parameter.tensor, parameter.route, parameter.layout
    state: dict[str, Any] = {}
    for key in sorted(state_keys(parameter)):
        if key == "step":
            state[key] = torch.zeros((), dtype=torch.float32, device="cpu")
        elif key == SECOND_MOMENT:
            shape = tuple(tensor.shape)
            state[key] = layout.zeros_of_neurons(tensor, neuron_shape(shape, route), neuron_dims(shape, route))
        else:
            state[key] = layout.zeros_like(tensor)
    return state


class StateCompletion:
    """Makes zero state for what is missing, on all ranks alike; ``states`` are those of an optimizer."""

    def __init__(self) -> None:
        # Keys that the states of the plan's parameters must have.
        self._needed: tuple[tuple[Tensor, frozenset[str]], ...] = ()
        # Parameters for which zero state was made since the ranks last agreed, or since states were loaded.
        self.made: set[Tensor] = set()

    def keys(self, parameter: RoutedParameter) -> frozenset[str]:
        """Keys that the state of a parameter must have."""
        return state_keys(parameter)

    def fill(self, parameter: RoutedParameter, state: dict[str, Any]) -> None:
        """Replace the state of a parameter by zeros; only the entries for its neurons if nothing else is missing.

        What another algorithm has left is dropped.
        """
        zeros = zero_state(parameter)
        for key in (ADAMW_STATE | MUON_STATE | {SECOND_MOMENT}) - zeros.keys():
            state.pop(key, None)
        if state.keys() >= zeros.keys() - {SECOND_MOMENT}:
            zeros = {key: value for key, value in zeros.items() if key not in state}
        state.update(zeros)

    def complete(self, parameters: Sequence[RoutedParameter], states: States) -> None:
        """Make the state that these parameters lack, frozen ones too, so that all ranks have equal keys; local."""
        for parameter in parameters:
            state = states[parameter.tensor]
            if not state.keys() >= self.keys(parameter):
                self.made.add(parameter.tensor)
                self.fill(parameter, state)

    def is_complete(self, states: States) -> bool:
        """Whether nothing is missing or was made since the last :meth:`agree`; local."""
        nothing = dict[str, Any]()
        return not self.made and all(states.get(tensor, nothing).keys() >= keys for tensor, keys in self._needed)

    def agree(self, parameters: Sequence[RoutedParameter], meshes: Sequence[MeshMembers], states: States) -> None:
        """Begin with zeros on all ranks where only some had to make state. Collective over the meshes."""
        lost: dict[Tensor, None] = {}
        names: dict[Tensor, str] = {parameter.tensor: parameter.route.name for parameter in parameters}
        # Local tensors are known by their names: they may be copies of one parameter, as FSDP2 leaves 0-d ones.
        local = {names[t]: t for members in meshes if members.mesh is None for t in members.tensors}
        has_made = {name: tensor in self.made for name, tensor in local.items()}
        for members in meshes:
            made = bytes(tensor in self.made for tensor in members.tensors)
            everyone = gather((made, has_made), members.host)
            differs = [len(set(flags)) > 1 for flags in zip(*(of_mesh for of_mesh, _ in everyone), strict=True)]
            lost |= dict.fromkeys(compress(members.tensors, differs))
            for name, tensor in local.items():
                if len({of_local[name] for _, of_local in everyone if name in of_local}) > 1:
                    lost[tensor] = None
        for tensor in lost:
            states.pop(tensor, None)
        self.complete(parameters, states)
        self.made.clear()
        self._needed = tuple((parameter.tensor, self.keys(parameter)) for parameter in parameters)
        if lost:
            warn_on_first_rank(
                f"some ranks had no optimizer state for {len(lost)} parameters ({names[next(iter(lost))]}, ...), so "
                "all ranks begin with zeros for them; clear or load state on all ranks alike",
                stacklevel=2,
            )


def check_shapes(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    placed: Callable[[Tensor, str, Tensor], PlacedState],
) -> None:
    """Raise ``ValueError`` for a saved state of another shape, outside of which fused kernels would write; local.

    ``placed`` says how the value of a parameter and a key of its state is laid out.
    """
    for saved, group in zip(state_dict["param_groups"], groups, strict=False):
        for place, (number, parameter) in enumerate(zip(saved["params"], group["params"], strict=False)):
            saved_keys = state_dict["state"].get(number, {}).keys()
            for key in sorted((MUON_STATE | ADAMW_STATE - {"step"} | {SECOND_MOMENT}) & saved_keys):
                value = state_dict["state"][number][key]
                shape, wanted = tuple(getattr(value, "shape", ())), placed(parameter, key, value).shape
                if shape != wanted:
                    others = ", another fused or fused_inputs" if key == SECOND_MOMENT else ""
                    name = group["param_names"][place] if "param_names" in group else f"parameter {number}"
                    raise ValueError(
                        f"{name} has the shape {tuple(parameter.shape)}, its saved {key} {shape} in place of {wanted}: "
                        f"the state is of another model{others}, or its parameters were in another order"
                    )


def convert_(
    states: Sequence[tuple[Tensor, dict[str, Any]]],
    convert: Callable[[Sequence[PlacedState]], list[Tensor]],
    placed: Callable[[Tensor, str, Tensor], PlacedState],
) -> None:
    """Replace each tensor of the states but ``step`` by what ``convert`` makes of it. Collective if ``convert`` is.

    All ranks must give ``states`` in the same order; the order of the keys in a state may differ.
    """
    places = [
        (parameter, state, key)
        for parameter, state in states
        for key, value in sorted(state.items())
        if isinstance(value, Tensor) and key != "step"
    ]
    converted = convert([placed(parameter, key, state[key]) for parameter, state, key in places])
    for (_, state, key), value in zip(places, converted, strict=True):
        state[key] = value
