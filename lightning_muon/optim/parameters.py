"""What an optimizer knows of its parameters: hyper-parameters, routes, the meshes on which they live, and state.

Also what a saved state becomes before an optimizer takes it: without what is gone, and by our names.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import warn_on_first_rank
from lightning_muon.config import OptimizerConfig, check_hyperparameters, name_of_function
from lightning_muon.math.newton_schulz import as_tuples
from lightning_muon.params.layers import clean_name
from lightning_muon.params.layout import PlacedState, RoutedParameter, local_tensor, neuron_dims, neuron_shape
from lightning_muon.params.routing import Route, route_by_shape, route_module, route_named
from lightning_muon.removed import STATE_OF, removed

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
    *("orthogonalize", "adjust_lr_fn", "muon_lr_factor", "betas", "adamw_eps", "algorithm"),
    *("normuon", "normuon_beta2"),
)


class CheckedGroups:
    """Checks hyper-parameters of param groups, which users, schedulers and loaded states change at any time."""

    def __init__(self) -> None:
        self._right: list[tuple[Any, ...]] = []

    def check(self, groups: Sequence[ParamGroup]) -> None:
        """Raise ``ValueError`` for the first wrong value; values that passed before are not read."""
        for group, right in zip_longest(groups, self._right[: len(groups)]):
            values = tuple(map(group.get, COMPARED))
            if values != right or any(isinstance(each, Tensor) for each in values):
                check_group_(group)
        # After the corrections of check_group_().
        self._right = [tuple(map(group.get, COMPARED)) for group in groups]


def hyperparameter_digest(groups: Sequence[ParamGroup]) -> int:
    """A hash of hyper-parameters, equal on ranks where they are; int32, not negative."""
    return zlib.crc32(repr(list(map(compared, groups))).encode()) >> 1


def compared(group: ParamGroup) -> dict[str, Any]:
    """Hyper-parameters that ranks compare, as Python numbers, without those that other optimizers have on a device."""
    values: dict[str, Any] = {}
    for key in COMPARED:
        value: Any = group.get(key)
        if not isinstance(value, Tensor) or value.device.type == "cpu":
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
    for key in COMPARED:
        if isinstance(group[key], Tensor) and group[key].device.type != "cpu":
            raise ValueError(
                f"{key} is a tensor on {group[key].device}, for which each step would wait; give a number, or a tensor "
                "on the CPU"
            )
    if group["adjust_lr_fn"] is None:
        group["adjust_lr_fn"] = "original"  # What None means to torch.optim.Muon.
    if group["muon_lr_factor"] == "auto":
        group["muon_lr_factor"] = 1.0
    for key in ("betas", "ns_coefficients"):
        if isinstance(group[key], list):
            group[key] = tuple(group[key])
    check_hyperparameters(group)


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


def require_those_of_module(
    groups: Sequence[ParamGroup], module: nn.Module | None, routes: Mapping[Tensor, Route]
) -> None:
    """Raise ``RuntimeError``, alike on all ranks, if a module has another parameter in place of one of ``groups``."""
    named = () if module is None else module.named_parameters()
    now: dict[str, Tensor] = {clean_name(name): parameter for name, parameter in named}
    own, held = {parameter for group in groups for parameter in group["params"]}, set(now.values())
    for group in groups:
        found = [routes[each].name if each in routes else "" for each in group["params"]]
        for name, old in zip(map(clean_name, group.get("param_names", found)), group["params"], strict=False):
            if old in held or isinstance(old, DTensor) or not name:
                continue
            # A parametrization stores the weight under names that begin with the old one.
            heirs = [each for each in now if each.replace("parametrizations.", "").startswith(name)]
            if not own.issuperset(now[each] for each in heirs):
                raise RuntimeError(
                    f"{name} of the module is no longer the parameter that the optimizer was made with, so it would "
                    "not be trained. Make the optimizer after fully_shard, and after layers are replaced; load a "
                    "state_dict afterwards"
                )


def require_updatable(routes: Mapping[Tensor, Route]) -> None:
    """Raise ``ValueError`` for a parameter that cannot be updated in place; local."""
    for parameter, route in routes.items():
        local = local_tensor(parameter.detach())
        if any(stride == 0 and size > 1 for size, stride in zip(local.shape, local.stride(), strict=True)):
            raise ValueError(
                f"{route.name} {tuple(local.shape)} has strides {local.stride()}: several of its elements are one "
                "place in memory, which cannot be updated; make it with .clone()"
            )
        if parameter.is_complex() and parameter.requires_grad:
            shape = tuple(local.shape)
            raise ValueError(f"{route.name} {shape} is complex: train what torch.view_as_real gives, or freeze it")


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
        # Parameters for which zero state was made since the last plan, or since states were loaded.
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
        """Whether nothing is missing or was made since the last :meth:`settle`; local."""
        nothing = dict[str, Any]()
        return not self.made and all(states.get(tensor, nothing).keys() >= keys for tensor, keys in self._needed)

    def settle(self, parameters: Sequence[RoutedParameter]) -> None:
        """Take the parameters of a new plan, whose state all ranks have made or kept alike; local."""
        self.made.clear()
        self._needed = tuple((parameter.tensor, self.keys(parameter)) for parameter in parameters)


def check_shapes(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    placed: Callable[[Tensor, str, Tensor], PlacedState],
) -> None:
    """Raise ``ValueError`` for a saved state of another shape, outside of which fused kernels would write; local.

    ``placed`` says how the value of a parameter and a key of its state is laid out.
    """
    known = MUON_STATE | ADAMW_STATE - {"step"} | {SECOND_MOMENT}
    for saved, group in zip(state_dict["param_groups"], groups, strict=False):
        names = group.get("param_names", [f"parameter {number}" for number in saved["params"]])
        for name, number, parameter in zip(names, saved["params"], group["params"], strict=False):
            state = state_dict["state"].get(number, {})
            for key in sorted(known & state.keys()):
                shape, wanted = tuple(getattr(state[key], "shape", ())), placed(parameter, key, state[key]).shape
                if shape != wanted:
                    raise ValueError(
                        f"{name} has the shape {tuple(parameter.shape)}, its saved {key} {shape} in place "
                        f"of {wanted}: the state is of another model, or of one with another fused or fused_inputs, or "
                        "its parameters were in another order"
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


# Options that say how the update is made, which no scheduler changes.
_OF_UPDATE = (
    *("nesterov", "ns_coefficients", "ns_steps", "ns_quality"),
    *("adjust_lr_fn", "muon_lr_factor", "normuon_beta2"),
)
# Those of which a loaded state cannot decide: which entries a state has, and code.
_OF_PROGRAM = ("normuon", "orthogonalize")


def understood(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a saved state, by number or by name, without what is gone, and with groups by our names; local.

    Raises:
        ValueError: The state is of an optimizer that is not known, or has options that have no counterpart here.
    """
    groups = [*map(dict, state_dict["param_groups"])]
    states = {key: dict(state) for key, state in state_dict["state"].items()}
    _leave_out_removed_(groups, states)
    if not are_ours(groups):
        for group in groups:
            _rename_(group)
        for state in states.values():
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32).cpu()
    return {**state_dict, "state": states, "param_groups": groups}


def are_ours(groups: Sequence[ParamGroup]) -> bool:
    """Whether param groups were saved by this package; one that has no parameter on this stage has lost its keys."""
    return any(group.keys() >= {"algorithm", "adamw_eps"} for group in groups)


def _leave_out_removed_(groups: Sequence[ParamGroup], states: Mapping[Any, dict[str, Any]]) -> None:
    """Drop entries of options that are gone; rank 0 warns once of those that were on. Momenta and moments stay."""
    used = dict[str, None]()
    for group in groups:
        for key, value in list(group.items()):
            if why := removed(key) or removed(f"{key}={value!r}"):
                del group[key]
                if value and value not in ("none", "auto"):  # What options that were off had.
                    used[why] = None
                if key == "ns_coefficients":
                    group.pop("ns_steps", None)  # It is their number.
    for state in states.values():
        for key in state.keys() & STATE_OF.keys():
            del state[key]
            used[removed(STATE_OF[key]) or key] = None
    if used:
        text = "the loaded state is of version 0.1; it goes on without what is gone, with the options of this program"
        warn_on_first_rank("; ".join([text, *used]), stacklevel=4)


def _rename_(group: ParamGroup) -> None:
    """Give a group of torch.optim.Muon or AdamW our names; what it lacks then stays as the program has it."""
    keys = group.keys()
    if "ns_coefficients" in keys:
        group["muon_lr_factor"] = 1.0  # The learning rate was chosen for Muon.
    elif keys >= {"betas", "eps", "amsgrad"}:
        group["adamw_eps"] = group.pop("eps")
        wrong = [f"{key}=True" for key in ("amsgrad", "maximize") if group.get(key)]
        if group.get("weight_decay") and group.get("decoupled_weight_decay") is False:
            wrong.append("weight_decay by torch.optim.Adam, where it changes gradients")
        if wrong:
            raise ValueError(f"the state was saved with {wrong[0]}, which is not supported; load only weights")
    elif group.get("params"):
        raise ValueError(
            f"the state is of an optimizer that is not known, with {sorted(keys)} in its param groups: it may be of "
            "torch.optim.Muon, AdamW or Adam; load only weights"
        )


def completed_groups(saved: Sequence[ParamGroup], own: Sequence[ParamGroup], keys: Set[str]) -> list[ParamGroup]:
    """Copies of saved param groups, with what they lack of ``keys``, and code, from those of the optimizer; local.

    Rank 0 warns of options of the update in which the two differ. Raises a ``ValueError`` for a wrong value.
    """
    groups, differing = [dict(group) for group in saved], dict[str, str]()
    for group, before in zip(groups, own, strict=False):
        group |= {key: before[key] for key in keys & before.keys() if key not in group or key in _OF_PROGRAM}
        check_group_(group)
        for key in _OF_UPDATE:
            if as_tuples(group[key]) != as_tuples(before[key]):
                differing.setdefault(key, f"{key}={group[key]!r} (not {before[key]!r})")
    if differing:
        warn_on_first_rank(
            f"the loaded state outweighs the program: {', '.join(differing.values())}; set others in "
            "optimizer.param_groups once the state is loaded (in on_train_start of a Trainer)",
            stacklevel=4,
        )
    return groups


def with_routes_of_now(
    state_dict: dict[str, Any], parameters: Sequence[tuple[RoutedParameter, frozenset[str]]]
) -> dict[str, Any]:
    """A saved state whose matrices have the entries of the algorithm that they run on now; local.

    ``parameters`` are those of the optimizer, with the keys that each one's state has. Rank 0 warns of matrices that
    have moved, or have no second moments. Parameters of which ``torch.optim`` has no state begin with zeros.

    Raises:
        ValueError: Entries are missing, or are not known.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    states, to_muon, to_adamw, begun = dict(state_dict["state"]), list[str](), list[str](), list[str]()
    is_complete = bool(states) and are_ours(state_dict["param_groups"])  # But for what was frozen.
    for number, (parameter, keys) in zip(numbers, parameters, strict=False):
        state = {key: value for key, value in states.pop(number, {}).items() if key in keys or key != SECOND_MOMENT}
        needed, saved = keys - {SECOND_MOMENT}, frozenset(state) - {SECOND_MOMENT}
        if saved == ADAMW_STATE and needed == MUON_STATE:
            state = {MOMENTUM: state["exp_avg"]}
            to_muon.append(parameter.route.name)
        elif saved == MUON_STATE and needed == ADAMW_STATE:
            state = {}
            to_adamw.append(parameter.route.name)
        elif saved != needed and (saved or (is_complete and parameter.tensor.requires_grad)):
            raise ValueError(
                f"{parameter.route.name} has {sorted(needed)} here, but {sorted(saved)} in the checkpoint: only here "
                f"{sorted(needed - saved) or 'nothing'}, only there {sorted(saved - needed) or 'nothing'}"
            )
        if state:
            states[number] = state
            begun += [parameter.route.name] if SECOND_MOMENT in keys - state.keys() else []
    texts = {
        "moved from AdamW to Muon: their first moments go on as momenta": to_muon,
        "moved from Muon to AdamW: their moments begin with zeros": to_adamw,
        f"have no {SECOND_MOMENT} in the loaded state: second moments begin with zeros": begun,
    }
    for text, names in texts.items():
        if names:
            warn_on_first_rank(f"{len(names)} matrices ({names[0]}, ...) {text}", stacklevel=5)
    return {**state_dict, "state": states}
