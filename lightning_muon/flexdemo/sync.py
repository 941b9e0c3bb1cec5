"""How nodes are kept together: not at all, by components of momenta in every step (DeMo), or by averages (DiLoCo).

Each way turns the gradients of a node into the updates that the base optimizer applies, and knows which state it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from typing_extensions import override

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.collectives import ALONE, AxisGroup, axis_group, make_buckets, start_all_reduce_sum
from lightning_muon.compat.torch import profiled
from lightning_muon.config import join_names
from lightning_muon.flexdemo.bucket import BucketPlan, MomentumBucket, Shape, plan_buckets, signs
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DiLoCo, ExchangeStep, check_replicator
from lightning_muon.math.checksum import checksums
from lightning_muon.optim.parameters import Gradients, StateCompletion, States
from lightning_muon.params.layout import (
    AxisPlacement,
    Decoupled,
    Layout,
    RoutedParameter,
    contiguous_stride,
    local_tensor,
)


@dataclass(frozen=True, eq=False)
class Trained:
    """The parameters of an optimizer, and their states."""

    parameters: Sequence[Tensor]  # In the order of the param groups.
    states: States  # States of the parameters.

    @property
    def trainable(self) -> Sequence[Tensor]:
        """The parameters that are not frozen."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]


# How a mesh of nodes is made, for errors.
NODES = "init_device_mesh(device_type, (num_nodes, ranks_per_node), mesh_dim_names=('replicate', 'shard'))"
# State keys of AdamW and Muon; if nodes train by themselves, each has its own values.
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# State entries without a dimension, those in the dtype of the weights, and those with one for each node; all but the
# second are float32.
_FLAGS = ("placeholder", "has_moved")
_LIKE_WEIGHTS = (*MOMENTS, "anchor")
_OF_NODES = ("residual",)


class InterNodeSync(StateCompletion):
    """The nodes of ``mesh`` (``None`` for a single process), without synchronization; subclasses add it."""

    # What the state of each parameter has beside that of the base optimizer. A placeholder, since torch takes an
    # optimizer without state for a new one.
    entries: ClassVar[tuple[str, ...]] = ("placeholder",)
    # Entries of a saved state that have a value for each node, (R, *shape).
    per_node: ClassVar[tuple[str, ...]] = ("node_weights", *MOMENTS)

    def __init__(self, config: FlexDeMoConfig, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.config, self.layout = config, NodeLayout(mesh)
        self.num_nodes = self.layout.num_nodes
        # The ranks of all nodes with the same shards.
        self.group = ALONE if mesh is None else axis_group(mesh, (0,))
        # Weights of this node while its parameters show the common ones, and whether they do for good.
        self.own_weights: dict[Tensor, Tensor] = {}
        self.is_for_good = False

    # ---- a step

    def plan(self, trained: Trained, num_steps: int) -> None:
        """Prepare for the current parameters, after so many steps. Collective over the nodes."""

    def updates(self, trained: Trained, gradients: Gradients, num_steps: int) -> Gradients:
        """Local updates of the parameters, after so many steps. Collective over the nodes."""
        updates = {tensor: gradients[tensor] for tensor in trained.trainable if tensor in gradients}
        return {tensor: signs(update) for tensor, update in updates.items()} if self.config.takes_sign else updates

    def finish(self, trained: Trained, num_steps: int) -> None:
        """End a step, with which there were so many. Collective over the nodes."""

    def common(self, trained: Trained) -> Sequence[Tensor]:
        """Tensors that must have the same bits on all nodes, one for each parameter, or none at all. Local."""
        return ()

    def sent_bytes(self, parameters: Sequence[Tensor]) -> int:
        """Bytes that this rank sends to other nodes in a step for these parameters, on average. Local."""
        return 0

    # ---- state

    @override
    def keys(self, parameter: RoutedParameter) -> frozenset[str]:
        return frozenset(self.entries) | self._keys_of_base(parameter)

    @override
    def fill(self, parameter: RoutedParameter, state: dict[str, Any]) -> None:
        self.fill_entries(parameter.tensor, state)
        if not state.keys() >= self._keys_of_base(parameter):
            super().fill(parameter, state)

    def fill_entries(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Add those of ``entries`` that the state of a parameter lacks. Local."""
        for key in self.entries:
            if key not in state:
                state[key] = self.zeros(key, parameter)

    def _keys_of_base(self, parameter: RoutedParameter) -> frozenset[str]:
        config = self.config
        has_state = config.base != "sgd" if parameter.route.algorithm == "adamw" else config.has_inner_momentum
        return super().keys(parameter) if has_state else frozenset()

    def zeros(self, key: str, parameter: Tensor) -> Tensor:
        """Zeros for a state entry: a flag, an entry for each node, or a tensor like the parameter. Local."""
        if key in _FLAGS:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        if key in _OF_NODES:
            local = torch.zeros_like(
                local_tensor(parameter), dtype=torch.float32, memory_format=torch.contiguous_format
            )
            return self.layout.of_all_nodes(parameter, local)
        return torch.zeros_like(parameter, dtype=parameter.dtype if key in _LIKE_WEIGHTS else torch.float32)

    # ---- checkpoints

    @property
    def loads(self) -> Sequence[str]:
        """The entries of a saved state that :meth:`load` takes, beside the weights of the nodes."""
        return [*(key for key in self.per_node if key in (*MOMENTS, *_OF_NODES)), *self.entries]

    def saved(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Entries that a checkpoint adds to the state of a parameter, or replaces in it. Local."""
        values = {"node_weights": self.own_weights.get(parameter, parameter.detach()), **state}
        own = {key: values[key] for key in self.per_node if key in values and key not in _OF_NODES}
        copies = {key: local_tensor(value).to(parameter.device, copy=True) for key, value in own.items()}
        return {key: self.layout.of_all_nodes(parameter, copy) for key, copy in copies.items()}

    def check_saved(self, states: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> None:
        """Raise if they are of a checkpoint with another way of synchronizing, or with ``base="sgd"``. Local."""
        all_marks, saved = {"residual", "node_weights", "anchor"}, {key for state in states for key in state}
        marks = all_marks & saved
        if marks and marks != all_marks & {*self.entries, *self.per_node}:
            alone = "DiLoCo" if "anchor" in marks else "NoReplication"
            saved_with = "components of momenta" if "residual" in marks else alone
            raise ValueError(
                f"the state was saved with {saved_with}, the replicator is {self.config.replicator} now; go on with "
                "the replicator of before (and without flatten_optimizer_state_dict, which leaves out node_weights), "
                "or load only the weights of the model"
            )
        is_of_sgd = not saved & {*MOMENTS} and all(group.get("algorithm") == "adamw" for group in groups)
        if marks and is_of_sgd and self.config.base != "sgd":
            raise ValueError(
                "the state was saved with base='sgd', the default of earlier versions, and base is "
                f"{self.config.base!r} now. Go on with FlexDeMoConfig(base='sgd', replicator=DCTTopK(top_k=32)), which "
                "is what defaults were, or load only the weights of the model"
            )

    def load(self, parameter: Tensor, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
        """Load what the state and :meth:`saved` have put into a checkpoint. Collective over the mesh."""
        self.own_weights.pop(parameter, None)
        if "node_weights" in saved:
            local_tensor(parameter.detach()).copy_(self.layout.of_this_node(saved["node_weights"], parameter))
        for key in self.loads:
            if key in saved:
                value, state[key] = saved[key], self.zeros(key, parameter)
                if key in self.per_node and value.ndim > parameter.ndim:
                    value = self.layout.of_this_node(value, parameter)
                elif key not in _FLAGS:
                    value = part_of(value, parameter)
                local_tensor(state[key]).copy_(value)


class MomentumSync(InterNodeSync):
    """Sends components of momenta to the other nodes, and applies the mean of those of all nodes (DeMo).

    State of each parameter: ``residual`` (R, *shape), the momentum that a node has not sent yet.
    """

    entries: ClassVar[tuple[str, ...]] = ("residual",)
    per_node: ClassVar[tuple[str, ...]] = ("residual",)

    def __init__(self, config: FlexDeMoConfig, mesh: DeviceMesh | None) -> None:
        super().__init__(config, mesh)
        # The buckets of the plan, in the order in which backward finishes them, and the residuals that they use.
        self._buckets: list[MomentumBucket] = []
        self._residuals: dict[Tensor, Tensor] = {}
        self._has_loaded = False  # Whether a state was loaded, so that even a single node may have residuals.

    @override
    def is_complete(self, states: States) -> bool:
        """Whether nothing is missing, and the residuals are still those that :meth:`plan` has taken."""
        return super().is_complete(states) and all(
            states[parameter].get("residual") is used for parameter, used in self._residuals.items()
        )

    @override
    def complete(self, parameters: Sequence[RoutedParameter], states: States) -> None:
        trained = [parameter.tensor for parameter in parameters if parameter.tensor.requires_grad]
        for plan in self._bucket_plans(trained):
            for part in plan.parts:
                check_replicator(part.replicator, part.block_shape)
        super().complete(parameters, states)

    @override
    def common(self, trained: Trained) -> Sequence[Tensor]:
        return trained.parameters

    @override
    def plan(self, trained: Trained, num_steps: int) -> None:
        if self.num_nodes == 1:
            return
        parameters = trained.trainable
        self._residuals = {tensor: trained.states[tensor]["residual"] for tensor in parameters}
        residuals = {tensor: local_tensor(residual)[0] for tensor, residual in self._residuals.items()}
        plans = self._bucket_plans(parameters)
        self._buckets = [MomentumBucket(plan, parameters, residuals) for plan in plans]

    @override
    def updates(self, trained: Trained, gradients: Gradients, num_steps: int) -> Gradients:
        if self.num_nodes == 1:
            return super().updates(trained, self._momenta_of_one_node(trained, gradients), num_steps)
        taking_part = [{tensor for tensor in bucket.parameters if tensor in gradients} for bucket in self._buckets]
        chosen = [number for number, tensors in enumerate(taking_part) if tensors]
        for number in chosen:
            bucket = self._buckets[number]
            with profiled("exchange", f"n{number}"):
                bucket.accumulate(gradients, self.config.decay)
                bucket.send(ExchangeStep(num_steps, number), taking_part[number], self.group)
        updates: dict[Tensor, Tensor] = {}
        for number in chosen:
            with profiled("decode", f"n{number}"):
                found = self._buckets[number].receive(self.config.merge, sign=self.config.takes_sign)
                updates |= {tensor: update.to(tensor.dtype) for tensor, update in found.items()}
        return updates

    @override
    def load(self, parameter: Tensor, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
        self._has_loaded = True
        super().load(parameter, state, saved)

    @override
    def sent_bytes(self, parameters: Sequence[Tensor]) -> int:
        return sum(plan.sent_bytes(self.num_nodes) for plan in self._bucket_plans(parameters))

    def _bucket_plans(self, parameters: Sequence[Tensor]) -> list[BucketPlan]:
        shapes = [Shape(tuple(tensor.shape), tuple(local_tensor(tensor).shape)) for tensor in parameters]
        return plan_buckets(shapes, self.config)

    def _momenta_of_one_node(self, trained: Trained, gradients: Gradients) -> Gradients:
        """The gradients, plus residuals that a run of several nodes has left."""
        momenta = {tensor: gradients[tensor] for tensor in trained.trainable if tensor in gradients}
        for tensor, gradient in momenta.items() if self._has_loaded else ():
            residual = local_tensor(trained.states[tensor]["residual"])[0]
            momenta[tensor] = gradient + (self.config.decay * residual).to(gradient.dtype)
            residual.zero_()
        return momenta


class DiLoCoSync(InterNodeSync):
    """Averages every few steps how far the nodes have moved their weights (DiLoCo).

    State of each parameter: ``anchor``, the weights of the last average; ``has_moved`` since then; ``outer_momentum``.
    """

    entries: ClassVar[tuple[str, ...]] = ("anchor", "has_moved", "outer_momentum")

    def __init__(self, config: FlexDeMoConfig, mesh: DeviceMesh | None) -> None:
        super().__init__(config, mesh)
        assert isinstance(config.replicator, DiLoCo)
        self._options = config.replicator
        # Parameters whose anchor is not known to be that of the other nodes.
        self._without_anchor: set[Tensor] = set()

    @override
    def fill_entries(self, parameter: Tensor, state: dict[str, Any]) -> None:
        if not state.keys() >= {*self.entries}:
            state.update({key: self.zeros(key, parameter) for key in self.entries})
            _anchor(state).copy_(local_tensor(parameter.detach()))
            self._without_anchor.add(parameter)

    @override
    def plan(self, trained: Trained, num_steps: int) -> None:
        """Set anchors: at the first step to the common weights, for parameters without state later to node 0's."""
        for parameter in trained.parameters:
            state = trained.states[parameter]
            if num_steps == 0:
                _anchor(state).copy_(local_tensor(parameter))
            elif parameter in self._without_anchor and self.num_nodes > 1:
                dist.broadcast(_anchor(state), group=self.group.group, group_src=0)
        self._without_anchor.clear()

    @override
    def updates(self, trained: Trained, gradients: Gradients, num_steps: int) -> Gradients:
        updates = super().updates(trained, gradients, num_steps)
        for parameter in updates:
            trained.states[parameter]["has_moved"].fill_(1)
        return updates

    @override
    def common(self, trained: Trained) -> Sequence[Tensor]:
        return [trained.states[parameter].get("anchor", parameter) for parameter in trained.parameters]

    @override
    def finish(self, trained: Trained, num_steps: int) -> None:
        if num_steps % self._options.period == 0:
            with profiled("exchange", "average"):
                self._average(trained)

    @override
    def load(self, parameter: Tensor, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
        super().load(parameter, state, saved)
        if "anchor" in saved:
            self._without_anchor.discard(parameter)

    @override
    def sent_bytes(self, parameters: Sequence[Tensor]) -> int:
        num_bytes = 4 * sum(local_tensor(parameter).numel() for parameter in parameters)
        return round(2 * (self.num_nodes - 1) * num_bytes / (self.num_nodes * self._options.period))

    def _average(self, trained: Trained) -> None:
        """Let all nodes go on from the next common weights. Collective over the nodes."""
        states = trained.states
        moved = [parameter for parameter in trained.parameters if states[parameter]["has_moved"]]
        drift = {p: (_anchor(states[p]).float() - local_tensor(p).float()).contiguous() for p in moved}
        self._sum_over_nodes(list(drift.values()))
        for parameter, total in drift.items():
            state = states[parameter]
            self._step_anchor(state, total.div_(self.num_nodes))
            local_tensor(parameter).copy_(_anchor(state))
            state["has_moved"].zero_()

    def _sum_over_nodes(self, tensors: Sequence[Tensor]) -> None:
        """Sum contiguous tensors in place, those of a bucket together. Collective over the nodes."""
        if self.num_nodes == 1:
            return
        buckets = make_buckets(tensors, self.config.bucket_bytes)
        sums = [torch.cat([tensor.view(-1) for tensor in bucket]) for bucket in buckets]
        works = [start_all_reduce_sum(total, self.group) for total in sums if total.numel()]
        for work in works:
            work.wait()
        for bucket, total in zip(buckets, sums, strict=True):
            for tensor, piece in zip(bucket, total.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(piece.view_as(tensor))

    def _step_anchor(self, state: dict[str, Any], outer_gradient: Tensor) -> None:
        """Take one SGD step of the common weights."""
        options = self._options
        momentum = local_tensor(state["outer_momentum"])
        momentum.mul_(options.outer_momentum).add_(outer_gradient)
        direction = outer_gradient + options.outer_momentum * momentum if options.nesterov else momentum
        anchor = _anchor(state)
        anchor.sub_((options.outer_lr * direction).to(anchor.dtype))


def _anchor(state: Mapping[str, Any]) -> Tensor:
    return local_tensor(state["anchor"])


class NodeLayout(Layout):
    """Layout, on the whole mesh, of DTensors on ``mesh["shard"]`` and plain tensors; each node has its gradients.

    Without a mesh that of a single process.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__(mesh)
        if mesh is not None and (axes := mesh.mesh_dim_names) != ("replicate", "shard"):
            raise ValueError(f"FlexDeMo takes a mesh with the axes of {NODES}, also for a single node, got {axes}")
        self._nodes, self._node = mesh, None if mesh is None else mesh["shard"]
        self.num_nodes = 1 if mesh is None else mesh.size(0)

    @override
    def mesh_and_placements(self, parameter: Tensor) -> tuple[DeviceMesh | None, tuple[AxisPlacement, ...]]:
        if self._nodes is None:
            return super().mesh_and_placements(parameter)
        return self._nodes, (Decoupled(), *self._inside(parameter, self._nodes))

    def of_all_nodes(self, parameter: Tensor, local: Tensor) -> Tensor:
        """The calling rank's parts of a tensor of each node as one tensor (R, *parameter.shape). Shares memory."""
        if self._nodes is None:
            return local.unsqueeze(0)
        shape, placements = torch.Size((self.num_nodes, *parameter.shape)), self._of_nodes(parameter, self._nodes)
        stride = contiguous_stride(shape)
        return DTensor.from_local(
            local.unsqueeze(0), self._nodes, placements, run_check=False, shape=shape, stride=stride
        )

    def of_this_node(self, value: Tensor, parameter: Tensor) -> Tensor:
        """The calling rank's part of a saved ``value`` (R, *parameter.shape), float32, for the current number of nodes.

        Of another number every node gets the mean, so that the mean over the nodes, which is what they apply of
        residuals, stays the same. Collective over the mesh of a DTensor.
        """
        if value.shape[1:] != parameter.shape:
            raise ValueError(
                f"what was saved of each node for a parameter of shape {tuple(parameter.shape)} has the shape "
                f"{tuple(value.shape)}; expected (number of nodes, *shape)"
            )
        is_same = value.shape[0] == self.num_nodes
        if self._nodes is None:
            own = (value.full_tensor() if isinstance(value, DTensor) else value).to(parameter.device)
        else:
            of_nodes, *inside = self._of_nodes(parameter, self._nodes)
            own = _redistributed(value, self._nodes, (of_nodes if is_same else Replicate(), *inside))
        return own[0].float().clone() if is_same else own.float().mean(0)

    def _of_nodes(self, parameter: Tensor, nodes: DeviceMesh) -> tuple[Placement, ...]:
        """Placements of a tensor (R, *parameter.shape)."""
        inside = self._inside(parameter, nodes)
        return (Shard(0), *(Shard(each.dim + 1) if isinstance(each, Shard) else each for each in inside))

    def _inside(self, parameter: Tensor, nodes: DeviceMesh) -> tuple[Placement, ...]:
        """Placement along the ranks of a node."""
        if not isinstance(parameter, DTensor):
            # FSDP2 takes no 0-d parameters; the training loop must average their gradients.
            if parameter.ndim and parameter.requires_grad and nodes.size(1) > 1:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not sharded, but a node has "
                    f"{nodes.size(1)} ranks, which would train it apart from each other; call "
                    "fully_shard(module, mesh=mesh['shard']) on the whole module, after its parts"
                )
            return (Replicate(),)
        if parameter.device_mesh != self._node:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} lies on {parameter.device_mesh}, but FlexDeMo averages "
                f"between the nodes of {nodes} itself; shard the model inside of a node only: "
                "fully_shard(module, mesh=mesh['shard'])"
            )
        return tuple(parameter.placements)


def part_of(value: Tensor, parameter: Tensor) -> Tensor:
    """The calling rank's part of a saved ``value``. Collective over the mesh of a DTensor."""
    if not isinstance(parameter, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    return _redistributed(value, parameter.device_mesh, parameter.placements)


def _redistributed(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """The local part of a DTensor, or of a whole tensor that every rank has, with other placements."""
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, (Replicate(),) * mesh.ndim, run_check=False)  # On the mesh's device.
    return value.redistribute(mesh, placements).to_local()


def check_equal(tensors: Sequence[tuple[str, Tensor]], everyone: AxisGroup) -> None:
    """Raise on all ranks if a DTensor differs between nodes, or a plain tensor between ranks, in any bit.

    Collective over ``everyone``, all ranks of all nodes with the same names.
    """
    if everyone.size == 1 or not tensors:
        return
    sums = gather(checksums([local_tensor(tensor) for _, tensor in tensors]).tolist(), everyone)
    rank_of = {coordinate: rank for rank, coordinate in enumerate(everyone.coordinates)}
    drifted: list[str] = []
    for number, (name, tensor) in enumerate(tensors):
        for rank, (_, shard) in enumerate(everyone.coordinates):
            first = rank_of[0, shard if isinstance(tensor, DTensor) else 0]
            if sums[rank][number] != sums[first][number]:
                drifted.append(name)
                break
    if drifted:
        raise RuntimeError(
            f"{len(drifted)} parameters are not what they are on the first node: {join_names(drifted)}. The nodes have "
            "begun with different weights, or their learning rates differ (a scheduler that follows the loss of one "
            "rank), or something has changed weights on some of them only, such as a callback that runs on rank 0, or "
            "gradients of parameters that FSDP2 does not shard (0-d ones, ignored_params) were not averaged before "
            "step(); let it be the same on all ranks, and load the last checkpoint"
        )
