"""State of the parameters of a ParallelMuon: created for all of them at once, and as a checkpoint has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_muon.optim.binding import BoundParameter
from lightning_muon.optim.elementwise import init_adamw_state
from lightning_muon.optim.matrix_step import States


def init_state(parameters: Sequence[BoundParameter], states: States) -> None:
    """Zero state for each parameter that has none, frozen ones too, so that all ranks have equal keys; local."""
    for parameter in parameters:
        state, layout = states[parameter.tensor], parameter.layout
        if parameter.route.algorithm == "muon" and "momentum_buffer" not in state:
            state["momentum_buffer"] = layout.zeros_like(parameter.tensor)
        elif parameter.route.algorithm == "adamw" and "exp_avg" not in state:
            state.update(init_adamw_state(parameter.tensor, layout))


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
