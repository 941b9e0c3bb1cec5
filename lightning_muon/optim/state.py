"""State of the parameters of a ParallelMuon: created for all of them at once, and as a checkpoint has it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_muon.comm.exchange import start_all_reduce_sum
from lightning_muon.optim.binding import BoundParameter
from lightning_muon.optim.elementwise import ADAMW_STATE, init_adamw_state
from lightning_muon.optim.meshes import MeshMembers

MUON_STATE = frozenset({"momentum_buffer"})


def state_keys(algorithm: str) -> frozenset[str]:
    """What the state of a parameter on ``algorithm`` must have."""
    return ADAMW_STATE if algorithm == "adamw" else MUON_STATE


def zero_state(parameter: BoundParameter) -> dict[str, Any]:
    """State of a parameter before its first step, laid out like the parameter; local."""
    if parameter.route.algorithm == "adamw":
        return init_adamw_state(parameter.tensor, parameter.layout)
    return {"momentum_buffer": parameter.layout.zeros_like(parameter.tensor)}


def lost_on_some(made: Collection[Tensor], meshes: Sequence[MeshMembers]) -> list[Tensor]:
    """The parameters whose state some ranks of their mesh had to make, while others had it.

    Collective over ``meshes``; every rank of them must call it, with the same parameters in them.

    Args:
        made: Those for which the calling rank has made zero state.
        meshes: Of all parameters.
    """
    lost: list[Tensor] = []
    for members in meshes:
        if members.host.group is None:
            continue
        counts = torch.tensor([tensor in made for tensor in members.tensors], dtype=torch.int32, device="cpu")
        start_all_reduce_sum(counts, members.host).wait()
        lost += [t for t, count in zip(members.tensors, counts.tolist(), strict=True) if 0 < count < members.host.size]
    return lost


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
