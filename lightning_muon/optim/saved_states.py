"""What a saved state becomes before an optimizer takes it: without what is gone, and by our names.

States may come from torch.optim.Muon and from torch.optim.AdamW or Adam. The momentum of ParallelMuon is a moving
average, m <- mu m + (1 - mu) g, as in torch.optim.Muon (torch/optim/_muon.py), and as the first moment of AdamW, which
a matrix goes on with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from lightning_muon.comm.agreement import warn_on_first_rank
from lightning_muon.math.newton_schulz import as_tuples
from lightning_muon.optim.parameters import (
    ADAMW_STATE,
    MOMENTUM,
    MUON_STATE,
    SECOND_MOMENT,
    ParamGroup,
    check_group_,
)
from lightning_muon.params.layout import RoutedParameter
from lightning_muon.removed import STATE_OF, removed

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
