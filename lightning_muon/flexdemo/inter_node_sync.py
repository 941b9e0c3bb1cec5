"""Synchronization between nodes: the base class of all ways, which synchronizes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.comm.groups import ALONE, axis_group
from lightning_muon.flexdemo.bucket import signs
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.node_state import NodeLayout, local_of_nodes, part_of
from lightning_muon.optim.parameters import Gradients, StateCompletion, States
from lightning_muon.params.layout import RoutedParameter, local_tensor


@dataclass(frozen=True, eq=False)
class Trained:
    """The parameters of an optimizer, and their states."""

    parameters: Sequence[Tensor]  # In the order of the param groups.
    states: States  # States of the parameters.

    @property
    def trainable(self) -> Sequence[Tensor]:
        """The parameters that are not frozen."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]


# State keys of AdamW and Muon; if nodes train by themselves, each has its own values.
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# State entry without a dimension, and those in the dtype of the weights; all others are float32.
_FLAG = "has_moved"
_LIKE_WEIGHTS = (*MOMENTS, "anchor")


class InterNodeSync(StateCompletion):
    """The nodes of ``mesh`` (``None`` for a single process), without synchronization; subclasses add it.

    It also makes the state of each parameter: its own entries, and those of the base optimizer.
    """

    # Keys of the state of a parameter that `load` takes, in this order.
    own_state: ClassVar[tuple[str, ...]] = MOMENTS
    # Those of them, and of `saved`, that have an entry for each node, (R, *shape).
    per_node: ClassVar[tuple[str, ...]] = ("node_weights", *MOMENTS)

    def __init__(self, config: FlexDeMoConfig, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self.layout = None if mesh is None else NodeLayout(mesh)
        self.num_nodes = 1 if mesh is None else mesh.size(0)
        # The ranks of all nodes with the same shards.
        self.group = ALONE if mesh is None else axis_group(mesh, (0,))
        self.num_steps = 0  # Number of steps before the current one.
        # Weights of this node while its parameters show the common ones, and whether they do for good.
        self.own_weights: dict[Tensor, Tensor] = {}
        self.is_for_good = False

    def of_all_nodes(self, parameter: Tensor, local: Tensor) -> Tensor:
        """The local parts of all nodes as one tensor (R, *parameter.shape); shares memory."""
        return local.unsqueeze(0) if self.layout is None else self.layout.of_all_nodes(parameter, local)

    @property
    def state_keys(self) -> frozenset[str]:
        """Keys that the state of a parameter must have."""
        return frozenset({"placeholder"})

    def init_state(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Add the entries that the state of a parameter lacks; local."""
        # A placeholder, since torch takes an optimizer without state for a new one.
        state.setdefault("placeholder", torch.zeros((), device="cpu"))

    @override
    def keys(self, parameter: RoutedParameter) -> frozenset[str]:
        return self.state_keys | self._keys_of_base(parameter)

    @override
    def fill(self, parameter: RoutedParameter, state: dict[str, Any]) -> None:
        self.init_state(parameter.tensor, state)
        if not state.keys() >= self._keys_of_base(parameter):
            super().fill(parameter, state)

    def _keys_of_base(self, parameter: RoutedParameter) -> frozenset[str]:
        config = self.config
        has_state = config.base != "sgd" if parameter.route.algorithm == "adamw" else config.has_inner_momentum
        return super().keys(parameter) if has_state else frozenset()

    def zeros(self, key: str, parameter: Tensor) -> Tensor:
        """Zeros for a state entry: a flag, an entry for each node, or a tensor like the parameter; local."""
        if key == _FLAG:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        if key in self.per_node and key not in MOMENTS:
            local = local_tensor(parameter)
            return self.of_all_nodes(parameter, torch.zeros(local.shape, dtype=torch.float32, device=local.device))
        return torch.zeros_like(parameter, dtype=parameter.dtype if key in _LIKE_WEIGHTS else torch.float32)

    def common(self, trained: Trained) -> Sequence[Tensor]:
        """Tensors that must have the same bits on all nodes, one for each parameter, or none at all; local."""
        return ()

    def plan(self, trained: Trained) -> None:
        """Prepare for the current parameters. Collective over the nodes."""

    def updates(self, trained: Trained, gradients: Gradients) -> Gradients:
        """Local updates of the parameters of the step. Collective over the nodes."""
        updates = {tensor: gradients[tensor] for tensor in trained.trainable if tensor in gradients}
        return {tensor: signs(update) for tensor, update in updates.items()} if self.config.takes_sign else updates

    def finish(self) -> None:
        """End a step. Collective over the nodes."""
        self.num_steps += 1

    def saved(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Entries that a checkpoint adds to the state of a parameter, or replaces in it; local."""
        own = {"node_weights": self.own_weights.get(parameter, parameter.detach())}
        own |= {key: state[key] for key in MOMENTS if key in state}
        copies = {key: local_tensor(value).to(parameter.device, copy=True) for key, value in own.items()}
        return {key: self.of_all_nodes(parameter, copy) for key, copy in copies.items()}

    def check_saved(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Raise if the states are of a checkpoint that was made with another way of synchronizing; local."""
        all_marks = {"residual", "node_weights", "anchor"}
        marks = all_marks & {key for state in states for key in state}
        if marks == {"anchor"}:
            raise ValueError(
                "the state has no node_weights, which flatten_optimizer_state_dict=True of "
                "torch.distributed.checkpoint.state_dict leaves out; get and set it without"
            )
        if marks and marks != all_marks & {*self.own_state, *self.per_node}:
            alone = "DiLoCo" if "anchor" in marks else "NoReplication"
            saved_with = "components of momenta" if "residual" in marks else alone
            raise ValueError(
                f"the state was saved with {saved_with}, the replicator is {self.config.replicator} now; "
                "go on with the replicator of before, or load only the weights of the model"
            )

    def load(self, parameter: Tensor, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
        """Load ``own_state``, and what :meth:`saved` has added; collective over the mesh, every rank must call it."""
        self.own_weights.pop(parameter, None)
        if "node_weights" in saved:
            weights = local_of_nodes(saved["node_weights"], parameter, self.layout)
            local_tensor(parameter.detach()).copy_(weights)
        for key in self.own_state:
            if key in saved:
                value, state[key] = saved[key], self.zeros(key, parameter)
                if key in self.per_node and value.ndim > parameter.ndim:
                    value = local_of_nodes(value, parameter, self.layout)
                elif key != _FLAG:
                    value = part_of(value, parameter)
                local_tensor(state[key]).copy_(value)

    def sent_bytes(self, parameters: Sequence[Tensor]) -> int:
        """Bytes that this rank sends to other nodes in a step for these parameters, on average; local."""
        return 0
