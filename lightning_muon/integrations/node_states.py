"""State of which each node has its own, in a checkpoint that another number of nodes loads.

Such a state is a tensor (nodes, *shape of the parameter). With the same number of nodes each gets its own back, bit for
bit. With another number all nodes get the same, by the rules of ``FlexDeMo.per_node``: see
:func:`~lightning_muon.flexdemo.node_state.shared_among`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_muon.flexdemo.node_state import Rule, shared_among
from lightning_muon.params.layout import local_tensor


def expect_saved_nodes(
    states: Mapping[str, MutableMapping[str, Any]],
    saved_size: Callable[[str, str], Sequence[int]],
    rules: Mapping[str, Rule],
) -> Callable[[], None]:
    """Put tensors for all saved nodes in the place of states of another number of nodes; local.

    Each rank then reads its shard of the states of all saved nodes.

    Args:
        states: Name of a parameter -> its state, which is changed.
        saved_size: (name, entry) -> size in the checkpoint.
        rules: Of the entries that each node has.

    Returns:
        To be called when the tensors are loaded: makes them states of the nodes of now.
    """
    replaced: list[tuple[MutableMapping[str, Any], str, Tensor]] = []
    for name, state in states.items():
        for entry in rules:
            own = state.get(entry)
            if own is None or saved_size(name, entry)[0] == own.shape[0]:
                continue
            replaced.append((state, entry, own))
            state[entry] = _of_all_nodes(own, tuple(saved_size(name, entry)))

    def share() -> None:
        for state, entry, own in replaced:
            shares = shared_among(local_tensor(state[entry]), own.shape[0], rules[entry])
            state[entry] = _like(own, shares[: local_tensor(own).shape[0]])

    return share


def share_whole(
    states: Mapping[str, Mapping[str, Any]], own: Mapping[str, Mapping[str, Any]], rules: Mapping[str, Rule]
) -> dict[str, dict[str, Any]]:
    """Whole states in which those of other numbers of nodes are shared by the nodes of now; local.

    Args:
        states: Name of a parameter -> its state, as it was saved.
        own: The same of the optimizer that is to have them.
        rules: Of the entries that each node has.
    """
    result = {name: dict(state) for name, state in states.items()}
    for name, state in result.items():
        for entry, rule in rules.items():
            now = own.get(name, {}).get(entry)
            if now is not None and entry in state and state[entry].shape[0] != now.shape[0]:
                state[entry] = shared_among(state[entry], now.shape[0], rule)
    return result


def _of_all_nodes(own: Tensor, size: tuple[int, ...]) -> Tensor:
    """Zeros of ``size``, of which this rank holds its shard for every saved node."""
    local = torch.zeros(size[0], *local_tensor(own).shape[1:], dtype=own.dtype, device=local_tensor(own).device)
    if not isinstance(own, DTensor):
        return local
    placements = [Replicate(), *own.placements[1:]]
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        local, own.device_mesh, placements, run_check=False, shape=torch.Size(size), stride=stride
    )


def _like(own: Tensor, local: Tensor) -> Tensor:
    if not isinstance(own, DTensor):
        return local
    return DTensor.from_local(
        local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
