"""State of the parameters of an optimizer: created for all of them at once, and as a checkpoint has it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, repeat
from operator import contains, is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.collectives import read_flags, start_all_reduce_sum
from lightning_muon.optim.elementwise import init_adamw_state
from lightning_muon.optim.parameters import ADAMW_STATE, MUON_STATE, BoundParameter, MeshMembers, States, state_keys


def zero_state(parameter: BoundParameter) -> dict[str, Any]:
    """State of a parameter before its first step, laid out like the parameter; local."""
    if parameter.route.algorithm == "adamw":
        return init_adamw_state(parameter.tensor, parameter.layout)
    return {"momentum_buffer": parameter.layout.zeros_like(parameter.tensor)}


class StateCompletion:
    """Zero state in the place of what is missing, on all ranks alike; ``states`` are those of an optimizer."""

    def __init__(self) -> None:
        # What the parameters of the plan must have.
        self._needed: tuple[tuple[Tensor, frozenset[str]], ...] = ()
        # The states that were complete, and those of them that must have a key, by this key.
        self._known: list[dict[str, Any]] = []
        self._having: dict[str, list[dict[str, Any]]] = {}
        # Parameters for which zero state was made since the ranks last agreed.
        self._made: set[Tensor] = set()

    def keys(self, parameter: BoundParameter) -> frozenset[str]:
        """What the state of a parameter must have."""
        return state_keys(parameter.route.algorithm)

    def fill(self, parameter: BoundParameter, state: dict[str, Any]) -> None:
        """Put zero state of a parameter in the place of what there is; local."""
        state.update(zero_state(parameter))

    def complete(self, parameters: Sequence[BoundParameter], states: States) -> None:
        """Make what these parameters lack, frozen ones too, so that all ranks have equal keys; local."""
        for parameter in parameters:
            state = states[parameter.tensor]
            if not state.keys() >= self.keys(parameter):
                self._made.add(parameter.tensor)
                self.fill(parameter, state)

    def loaded(self) -> None:
        """The states are those of a checkpoint now; local."""
        self._made.clear()

    def is_complete(self, states: States) -> bool:
        """Whether nothing is missing or was made since the last :meth:`agree`; local."""
        if self._made:
            return False
        # Looking up tensors would take several times as long, which counts for hundreds of small parameters.
        if len(states) == len(self._known) and all(map(is_, states.values(), self._known)):
            return all(all(map(contains, having, repeat(key))) for key, having in self._having.items())
        nothing = dict[str, Any]()
        return all(states.get(tensor, nothing).keys() >= keys for tensor, keys in self._needed)

    def agree(self, parameters: Sequence[BoundParameter], meshes: Sequence[MeshMembers], states: States) -> None:
        """Begin with zero state on all ranks for each parameter for which only some of them had to make it.

        Collective over the meshes of the parameters; every rank of them must call it.
        """
        lost: dict[Tensor, None] = {}
        names: dict[Tensor, str] = {parameter.tensor: parameter.route.name for parameter in parameters}
        # Local tensors are known by their names: they may be copies of one parameter, as FSDP2 leaves 0-d ones.
        local = {names[t]: t for members in meshes if members.mesh is None for t in members.tensors}
        has_made = {name: tensor in self._made for name, tensor in local.items()}
        for members in meshes:
            if members.host.group is not None:
                everyone = gather(has_made, members.host.group)
                for name, tensor in local.items():
                    if len({each[name] for each in everyone if name in each}) > 1:
                        lost[tensor] = None
                made = [tensor in self._made for tensor in members.tensors]
                counts = torch.tensor(made, dtype=torch.int32, device="cpu")
                start_all_reduce_sum(counts, members.host).wait()
                is_lost = read_flags((counts > 0).logical_and(counts < members.host.size))
                lost |= dict.fromkeys(compress(members.tensors, is_lost))
        for tensor in lost:
            states.pop(tensor, None)
        self.complete(parameters, states)
        self._made.clear()
        self._needed = tuple((parameter.tensor, self.keys(parameter)) for parameter in parameters)
        self._known, self._having = list(states.values()), {}
        for tensor, keys in self._needed:
            for key in keys:
                self._having.setdefault(key, []).append(states[tensor])
        if lost and dist.get_rank() == 0:
            warnings.warn(
                f"some ranks had no optimizer state for {len(lost)} parameters ({names[next(iter(lost))]}, ...), so "
                "all ranks begin with zeros for them; clear or load state on all ranks alike",
                stacklevel=2,
            )


def check_shapes(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` for a saved state that is not of the shape of its parameter; local.

    Fused kernels do not look, and would write outside of the tensors.
    """
    for saved, group in zip(state_dict["param_groups"], groups, strict=False):
        for place, (number, parameter) in enumerate(zip(saved["params"], group["params"], strict=False)):
            saved_keys = state_dict["state"].get(number, {}).keys()
            for key in sorted((MUON_STATE | ADAMW_STATE - {"step"}) & saved_keys):
                shape = tuple(getattr(state_dict["state"][number][key], "shape", ()))
                if shape != tuple(parameter.shape):
                    name = group["param_names"][place] if "param_names" in group else f"parameter {number}"
                    raise ValueError(
                        f"{name} has the shape {tuple(parameter.shape)}, its saved {key} {shape}: the state is of "
                        "another model, or its parameters were in another order"
                    )


def convert_(
    states: Sequence[tuple[Tensor, dict[str, Any]]], convert: Callable[[Sequence[tuple[Tensor, Tensor]]], list[Tensor]]
) -> None:
    """Replace what is laid out like its parameter by what ``convert`` makes of it: ``Layout.saved`` or ``.loaded``.

    Collective if ``convert`` is; every rank must call it with the same parameters.
    """
    places = [
        (parameter, state, key)
        for parameter, state in states
        for key, value in state.items()
        if isinstance(value, Tensor) and key != "step"
    ]
    converted = convert([(parameter, state[key]) for parameter, state, key in places])
    for (_, state, key), value in zip(places, converted, strict=True):
        state[key] = value
