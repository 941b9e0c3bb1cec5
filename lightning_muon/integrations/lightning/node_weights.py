"""Weights to save where each node has its own for a while: one set of them, never a mixture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_muon.comm.mesh import axis_group
from lightning_muon.optim.flexdemo.flexdemo import FlexDeMo
from lightning_muon.replicators.local_steps import LocalSteps
from lightning_muon.sharding.broadcast import mesh_device


@contextmanager
def common_weights(optimizers: Sequence[Any]) -> Iterator[bool]:
    """Inside, parameters are those that all nodes have in common, as far as there are such; local.

    Yields:
        Whether the nodes train by themselves, so that weights must be copied before this ends.
    """
    own = [each for each in optimizers if isinstance(each, FlexDeMo) and isinstance(each.config.replicator, LocalSteps)]
    with ExitStack() as stack:
        for optimizer in own:
            stack.enter_context(optimizer.common_weights())
        yield bool(own)


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same weights in memory of their own, tied ones once; local."""
    copies: dict[int, Any] = {}
    for value in state.values():
        if isinstance(value, Tensor) and id(value) not in copies:
            copies[id(value)] = value.detach().clone()
    return {name: copies.get(id(value), value) for name, value in state.items()}


def of_first_node(state: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Copies of the shards that the first node has. Collective over the nodes; every rank must call it.

    A checkpoint takes what several nodes hold from any of them, one part from this and the next from that node.

    Args:
        state: Weights, on ``mesh["shard"]`` or plain.
        mesh: (replicate, shard).
    """
    nodes = axis_group(mesh, (0,))
    copies = copied(state)
    for value in {id(value): value for value in copies.values() if isinstance(value, Tensor)}.values():
        local = value.to_local() if isinstance(value, DTensor) else value
        if nodes.group is not None and local.numel():
            # Bytes travel: backends do not carry every dtype.
            payload = local.to(mesh_device(mesh)).contiguous().reshape(-1).view(torch.uint8)
            dist.broadcast(payload, group=nodes.group, group_src=0)
            local.copy_(payload.view(local.dtype).view(local.shape))
    return copies
