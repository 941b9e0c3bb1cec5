"""Checkpoints of nodes that have weights or state of their own.

Weights: one set of them is evaluated and saved, never a mixture. State: a tensor (nodes, *shape of the parameter). With
the same number of nodes each gets its own back, bit for bit. With another number all nodes get the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.groups import axis_group
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.flexdemo.replicators import DiLoCo, LocalSteps
from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.weights import broadcast, mesh_device


def show_common(optimizers: Sequence[Any], *, for_good: bool = False) -> bool:
    """Put the weights that all nodes have in common into the module; return whether they changed. Local."""
    have_changed = [each.show_common_weights(for_good=for_good) for each in _training_alone(optimizers)]
    return any(have_changed)


def show_own(optimizers: Sequence[Any]) -> bool:
    """Undo :func:`show_common`, unless it was for good; return whether weights changed. Local."""
    have_changed = [each.show_own_weights() for each in optimizers if isinstance(each, FlexDeMo)]
    return any(have_changed)


def forget_own(optimizers: Sequence[Any]) -> None:
    """Keep the weights in the module, and forget the nodes' own ones; local."""
    for each in optimizers:
        if isinstance(each, FlexDeMo):
            each.forget_own_weights()


@contextmanager
def common_weights(optimizers: Sequence[Any]) -> Iterator[bool]:
    """Context in which parameters are those common to all nodes; yields whether they must be copied. Local."""
    alone = _training_alone(optimizers)
    with ExitStack() as stack:
        for optimizer in alone:
            stack.enter_context(optimizer.common_weights())
        yield bool(alone)


def steps_left_out(optimizers: Sequence[Any]) -> int:
    """Number of last steps that are not in the weights of the last average; local."""
    averaged = [(each.config.replicator, each.num_exchanges) for each in _training_alone(optimizers)]
    return max((steps % way.period for way, steps in averaged if isinstance(way, DiLoCo)), default=0)


def _training_alone(optimizers: Sequence[Any]) -> list[FlexDeMo]:
    """The optimizers whose nodes train by themselves and have taken a step, so that weights may differ."""
    flexdemo = [each for each in optimizers if isinstance(each, FlexDeMo) and each.num_exchanges]
    return [each for each in flexdemo if isinstance(each.config.replicator, LocalSteps)]


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Clone the weights, tied ones once; local."""
    tensors = {id(value): value for value in state.values() if isinstance(value, Tensor)}
    copies = {key: value.detach().clone() for key, value in tensors.items()}
    return {name: copies.get(id(value), value) for name, value in state.items()}


def of_first_node(state: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Copies of the weights of the first node of ``mesh``. Collective over the nodes."""
    nodes = axis_group(mesh, (0,))
    copies = copied(state)
    if nodes.group is not None:
        tensors = {id(value): value for value in copies.values() if isinstance(value, Tensor)}
        broadcast(list(map(local_tensor, tensors.values())), nodes.group, mesh_device(mesh))
    return copies
