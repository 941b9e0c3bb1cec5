"""State of which each node has its own, in a checkpoint that another number of nodes loads.

Such a state is a tensor (nodes, *shape of the parameter). With the same number of nodes each gets its own back, bit for
bit. With another number all nodes get the same: of what was not sent yet sum(of the saved nodes) / number of nodes now,
so that the sum over the nodes is what it was; of weights the mean of the saved nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_muon.params.layout import local_tensor

# Entries of the state of a parameter under FlexDeMo -> whether it is their sum that stays, else their mean. The moments of
# AdamW are among them where nodes train by themselves; elsewhere they have the shape of the parameter.
PER_NODE = {"residual": True, "node_weights": False, "launched": False, "exp_avg": False, "exp_avg_sq": False}


def expect_saved_nodes(
    states: Mapping[str, MutableMapping[str, Any]], saved_size: Callable[[str, str], Sequence[int]]
) -> Callable[[], None]:
    """Put tensors for all saved nodes in the place of states of another number of nodes; local.

    Each rank then reads its shard of the states of all saved nodes.

    Args:
        states: Name of a parameter -> its state, which is changed.
        saved_size: (name, entry) -> size in the checkpoint.

    Returns:
        To be called when the tensors are loaded: makes them states of the nodes of now.
    """
    replaced: list[tuple[MutableMapping[str, Any], str, Tensor]] = []
    for name, state in states.items():
        for entry in PER_NODE:
            own = state.get(entry)
            if own is None or own.ndim == 0 or saved_size(name, entry)[0] == own.shape[0]:
                continue
            replaced.append((state, entry, own))
            state[entry] = _of_all_nodes(own, tuple(saved_size(name, entry)))

    def share() -> None:
        for state, entry, own in replaced:
            shares = _shared(local_tensor(state[entry]), own.shape[0], keep_sum=PER_NODE[entry])
            state[entry] = _like(own, shares[: local_tensor(own).shape[0]])

    return share


def share_whole(
    states: Mapping[str, Mapping[str, Any]], own: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Whole states in which those of other numbers of nodes are shared by the nodes of now; local.

    Args:
        states: Name of a parameter -> its state, as it was saved.
        own: The same of the optimizer that is to have them.
    """
    result = {name: dict(state) for name, state in states.items()}
    for name, state in result.items():
        for entry in PER_NODE:
            now = own.get(name, {}).get(entry)
            if now is not None and now.ndim and entry in state and state[entry].shape[0] != now.shape[0]:
                state[entry] = _shared(state[entry], now.shape[0], keep_sum=PER_NODE[entry])
    return result


def _shared(saved: Tensor, num_nodes: int, *, keep_sum: bool) -> Tensor:
    """(saved nodes, *shape) -> (num_nodes, *shape), equal for all of these nodes."""
    share = saved.float().sum(dim=0, keepdim=True) / (num_nodes if keep_sum else saved.shape[0])
    return share.to(saved.dtype).expand(num_nodes, *share.shape[1:]).contiguous()


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
