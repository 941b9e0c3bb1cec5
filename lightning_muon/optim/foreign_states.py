"""States of other optimizers as states of ParallelMuon: torch.optim.Muon and AdamW, Keller Jordan's Muon, and dion's.

The momentum of ParallelMuon is a moving average, m <- mu m + (1 - mu) g, as in torch.optim.Muon and Keller Jordan's,
and as the first moment of AdamW, which a matrix goes on with. In dion it is a sum, M <- mu M + g (heavy ball). Both
begin with 0, so m = (1 - mu) M.

Sources of names and formulas: torch/optim/_muon.py; github.com/KellerJordan/Muon, muon.py, and
github.com/microsoft/dion, dion/muon.py and dion/megabatch_base.py, both as of 2026.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_muon.config import MuonConfig
from lightning_muon.optim.parameters import ADAMW_STATE, ParamGroup, RoutedParameter, States, state_keys

Kind = Literal["torch.optim.Muon", "torch.optim.AdamW", "Muon by Keller Jordan", "dion"]

_DEFAULTS = MuonConfig()
# What Keller Jordan's Muon always does, so that no key of its groups says it. Its learning rate was chosen for Muon.
_OF_KELLER_JORDAN = {"adjust_lr_fn": "original", "muon_lr_factor": 1.0} | {
    key: getattr(_DEFAULTS, key) for key in ("nesterov", "ns_coefficients", "ns_steps", "eps")
}
_NAMES_IN_DION = {"momentum": "exp_avg", "variance": "exp_avg_sq", "step_dev": "step"}


def translated(state_dict: Mapping[str, Any], own: Sequence[Sequence[RoutedParameter]]) -> Mapping[str, Any]:
    """Return a state, by number or by name, as ParallelMuon has it; the same object if it is of no other optimizer.

    ``own`` are the parameters of each param group here. Parameters that never had a gradient may have no state. Local.

    Raises:
        ValueError: The state cannot be translated.
    """
    saved = state_dict["param_groups"]
    # Numbers of groups are compared later. A group of ours that has no parameter on this stage has lost its keys.
    if len(saved) != len(own) or any(map(_is_ours, saved)):
        return state_dict
    by_name = {parameter.route.name: parameter for members in own for parameter in members}
    states, groups, from_adamw = dict(state_dict["state"]), list[ParamGroup](), list[str]()
    for group, members in zip(saved, own, strict=True):
        kind, keys, parameters = _kind_of(group), list(group["params"]), members
        if any(isinstance(key, str) for key in keys):
            parameters = [by_name.get(key) for key in keys]
        elif kind == "Muon by Keller Jordan":
            keys = _in_our_order(keys, members, states)
        for key, parameter in zip(keys, parameters, strict=False):
            if parameter is not None and states.get(key):
                state = _state(kind, group, states[key], parameter)
                from_adamw += [parameter.route.name] * ("exp_avg" in states[key] and "momentum_buffer" in state)
                states[key] = state
        groups.append(_group(kind, group, members) | {"params": keys})
    _warn_of_adamw(from_adamw)
    return {**state_dict, "state": states, "param_groups": groups}


def take_moments_as_momenta_(parameters: Sequence[RoutedParameter], states: States) -> None:
    """Make AdamW's first moment the momentum of matrices that run on Muon and ran on AdamW when saved; local."""
    moved = [
        parameter
        for parameter in parameters
        if parameter.route.algorithm == "muon" and states.get(parameter.tensor, {}).keys() == ADAMW_STATE
    ]
    for parameter in moved:
        states[parameter.tensor] = {"momentum_buffer": states[parameter.tensor]["exp_avg"]}
    _warn_of_adamw([parameter.route.name for parameter in moved])


def _is_ours(group: Mapping[str, Any]) -> bool:
    return group.keys() >= {"algorithm", "adamw_eps"}


def _kind_of(group: Mapping[str, Any]) -> Kind | None:
    """Which optimizer a param group was saved by, if it is known."""
    keys = group.keys()
    if "ns_coefficients" in keys:
        return "torch.optim.Muon"
    if keys >= {"algorithm", "mu", "epsilon"}:
        return "dion"
    if keys >= {"nesterov", "ns_steps"}:
        raise ValueError(
            "the state is of a Muon that keeps sums of gradients in some versions and averages in others, and its keys "
            f"{sorted(keys)} do not say which (Keller Jordan's of before May 2025, for example)"
        )
    is_plain = keys >= {"lr", "weight_decay", "momentum"} and not keys & {"dampening", "alpha", "eps", "betas"}
    if "use_muon" in keys or is_plain:
        return "Muon by Keller Jordan"
    return "torch.optim.AdamW" if keys >= {"betas", "eps", "amsgrad"} else None


def _in_our_order(keys: Sequence[Any], own: Sequence[RoutedParameter], states: Mapping[Any, Any]) -> list[Any]:
    """The saved number of each of our parameters; the distributed version of that optimizer sorts them by shape."""
    momenta = [states.get(key, {}).get("momentum_buffer") for key in keys]
    missing = sum(each is None for each in momenta)
    if missing in (0, len(keys)) and len(keys) == len(own):
        pairs = zip(momenta, own, strict=True)
        if all(each is None or each.shape == parameter.tensor.shape for each, parameter in pairs):
            return list(keys)
        order = sorted(range(len(own)), key=lambda place: own[place].tensor.shape, reverse=True)
        return [key for _, key in sorted(zip(order, keys, strict=True))]
    if missing and any("momentum_buffer" in states.get(key, {}) for key in keys):
        raise ValueError(
            f"{missing} of {len(keys)} momenta are missing: each rank of that optimizer has those of its own matrices, "
            "and the state is that of one rank"
        )
    return list(keys)


def _group(kind: Kind | None, group: Mapping[str, Any], own: Sequence[RoutedParameter]) -> ParamGroup:
    """Hyper-parameters of a group by our names; those that it lacks stay as they are here."""
    found = dict(group)
    if kind == "torch.optim.Muon":
        return found | {"muon_lr_factor": 1.0}
    if kind == "dion":
        return _group_of_dion(found, own)
    if kind == "Muon by Keller Jordan" and found.pop("use_muon", True):
        return found | _OF_KELLER_JORDAN
    if found.get("weight_decay") and found.get("decoupled_weight_decay") is False:
        raise ValueError(
            f"the state is of torch.optim.Adam with weight_decay={found['weight_decay']}, which changes gradients; "
            "here weights decay apart from gradients, as in AdamW: set weight_decay of its param groups to 0 in the "
            "checkpoint, or load only weights"
        )
    if kind is not None:
        found["adamw_eps"] = found.pop("eps")
    return found


def _group_of_dion(group: ParamGroup, own: Sequence[RoutedParameter]) -> ParamGroup:
    if group.get("cautious_wd"):
        raise ValueError("the state was saved with cautious_wd=True, which is not supported; load only weights")
    found: ParamGroup = {key: float(group[key]) for key in ("lr", "initial_lr", "weight_decay") if key in group}
    if group["algorithm"] == "adamw":
        return found | {"betas": (group["beta1"], group["beta2"]), "adamw_eps": group["epsilon"]}
    found |= {"momentum": group["mu"], "nesterov": group["nesterov"]}
    # Its "spectral_norm" is sqrt(rows / cols).
    have_outputs_first = all(p.tensor.ndim == 2 and not p.route.is_transposed for p in own)
    rules = {"rms_norm": "match_rms_adamw"} | ({"spectral_norm": "spectral_mup"} if have_outputs_first else {})
    if group["adjust_lr"] in rules:
        return found | {"adjust_lr_fn": rules[group["adjust_lr"]], "muon_lr_factor": 1.0}
    _warn(
        f"dion's adjust_lr={group['adjust_lr']!r} has no counterpart for these shapes: the learning rate and "
        "adjust_lr_fn of the program stay"
    )
    return {key: value for key, value in found.items() if key not in ("lr", "initial_lr")}


def _state(
    kind: Kind | None, group: Mapping[str, Any], state: Mapping[str, Any], parameter: RoutedParameter
) -> dict[str, Any]:
    """Entries of one parameter by our names, with the momentum as an average."""
    found, algorithm = dict(state), parameter.route.algorithm
    if kind == "dion" and group["algorithm"] == "muon":
        found = {"momentum_buffer" if key == "momentum" else key: value for key, value in found.items()}
        if "momentum_buffer" in found:
            found["momentum_buffer"] = found["momentum_buffer"] * (1 - float(group["mu"]))
    elif kind == "dion":
        found = {"step": group["step"]} | {_NAMES_IN_DION.get(key, key): value for key, value in found.items()}
    if "step" in found:
        found["step"] = torch.as_tensor(found["step"], dtype=torch.float32).cpu()
    if algorithm == "muon" and found.keys() == ADAMW_STATE:
        found = {"momentum_buffer": found["exp_avg"]}
    if kind is None or found.keys() != state_keys(algorithm):
        raise ValueError(
            f"{parameter.route.name} runs on {algorithm} here, which needs {sorted(state_keys(algorithm))}; its state, "
            f"that of {kind or 'an optimizer that is not known'}, has {sorted(map(str, state))}"
        )
    return found


def _warn_of_adamw(names: Sequence[str]) -> None:
    if names:
        _warn(
            f"{len(names)} matrices ({names[0]}, ...) have trained with AdamW: its first moments go on as the momenta "
            "of Muon, the second ones are dropped"
        )


def _warn(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(text, stacklevel=4)
