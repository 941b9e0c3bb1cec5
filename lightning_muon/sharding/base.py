"""What every way of sharding does for a training loop, and how weights and buffers become equal on all ranks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from lightning_muon.comm.collectives import ALONE, AxisGroup, axis_group
from lightning_muon.params.layers import parameter_uses
from lightning_muon.params.layout import Layout, local_tensor, parameters_of
from lightning_muon.sharding.clipping import clip_norm_
from lightning_muon.sharding.units import WrapPolicy

T = TypeVar("T")
BucketBytes = int | Literal["auto"]
Accumulate = Literal["sharded", "whole"]
_BROADCAST_BYTES = 64 * 2**20
JOINS_STATE_DICTS = ContextVar("JOINS_STATE_DICTS", default=False)  # Whether it is in :func:`joined_state_dicts`.


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """The user's options of how a model is sharded; each mode takes those that it can honour.

    Args:
        wrap_policy: The units of the model: what FSDP2 gathers together, and what waits together for new values; see
            :func:`lightning_muon.sharding.units.find_units`.
        reshard_after_forward: FSDP2 frees the whole weights of a unit between forward and backward. ``True`` leaves
            those of the root, a number keeps them sharded over that many ranks.
        reshard_after_backward: FSDP2 frees them also between the micro-batches of an accumulated batch.
        accumulate: What FSDP2 keeps of the gradients between these. ``"sharded"``: the sums over the shard axis, of
            which the last micro-batch makes those over the replicas. ``"whole"``: nothing is sent before the last one,
            and every rank keeps gradients as large as the model; so do bfloat16 weights without replicas, whose sums
            of shards FSDP2 would round.
        bucket_bytes: Gradients that travel together where FSDP2 does not say it. ``"auto"``: 25 MiB, as in torch's
            DDP.
    """

    wrap_policy: WrapPolicy = "auto"
    reshard_after_forward: bool | int = True
    reshard_after_backward: bool = True
    accumulate: Accumulate = "sharded"
    bucket_bytes: BucketBytes = "auto"


@dataclass(frozen=True, kw_only=True)
class ModeOptions(ShardingOptions):
    """All options of a mode: those of the user, and those that the run decides.

    Args:
        mp_policy: Mixed precision of FSDP2.
        shard_root: Whether the model is an FSDP2 root; see :func:`lightning_muon.sharding.shard_model.shard_model`.
        wait_for_parameters: Let an optimizer step return only when all new values are there.
        roots: FSDP2 roots instead of the model: the parts of the stages of a pipeline, which hold all that trains.
        stages: All ranks by (pipeline, replicate, shard) if the model is a stage of a pipeline; norms are over it.
        decoupled_nodes: Gradients are means over the shard axis only, and the optimizer, a
            :class:`~lightning_muon.FlexDeMo`, decides what the nodes (the replicate axis) send each other.
    """

    mp_policy: MixedPrecisionPolicy | None = None
    shard_root: bool = True
    wait_for_parameters: bool = False
    decoupled_nodes: bool = False
    roots: Sequence[nn.Module] | None = None
    stages: DeviceMesh | None = None


class ShardingMode(ABC):
    """One way to shard a model, for one run.

    The order of calls: :meth:`prepare`, and for a training :meth:`attach`; in every step :meth:`begin_forward` and a
    backward pass for each micro-batch, all but the last inside :meth:`no_sync`, then :meth:`finish_gradients`,
    clipping, and the step of the optimizers. Every method that is not said to be local is collective
    over the mesh.

    Args:
        mesh: 1-D (shard), or 2-D (replicate, shard): the ranks with batches of their own.
        options: What the user chose.
    """

    name: ClassVar[str]  # What users call it.
    shards_weights: ClassVar[bool]  # Whether parameters are DTensors between the steps.
    # Whether new values may still be on their way after an optimizer step.
    parameters_arrive_late: ClassVar[bool] = False
    takes: ClassVar[frozenset[str]] = frozenset()  # The fields of `ModeOptions` that mean something to it.

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        self.mesh, self.options = mesh, options
        # The ranks whose gradients a backward pass averages.
        self.reduced_over = mesh["shard"] if options.decoupled_nodes else mesh
        self.layout: Layout = Layout()  # Where the gradients of the parameters are found.
        self._divisor: float | None = None  # Of the sum of the gradients over the ranks.
        self.has_failed = False  # Whether a forward or backward pass has raised.
        # Copies of parameters of another stage of a pipeline, with equal gradients: norms count only the others.
        self.copies: Collection[Tensor] = ()

    @abstractmethod
    def prepare(self, module: nn.Module) -> None:
        """Give all ranks the weights and buffers of the first one, and shard the parameters."""

    @abstractmethod
    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        """Watch gradients, and create the state of all optimizers that step the parameters of the prepared module."""

    @staticmethod
    def attached(part: T | None) -> T:
        """Return what :meth:`attach` has made; raise before it. Local."""
        if part is None:
            raise RuntimeError("call mode.prepare(module) and mode.attach(module, optimizers) first")
        return part

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which forward and backward do not communicate gradients; local."""

    def set_gradient_divisor(self, divisor: float | None) -> None:
        """Divide the sum of the gradients over the ranks by this; ``None``: by their number. Local, same on all ranks.

        Call it before the last backward pass of a step; it holds until it is called again.
        """
        if divisor is not None and not 0 < divisor < math.inf:
            raise ValueError(f"the divisor of the gradients must be positive and finite, got {divisor}")
        self._divisor = divisor

    def pass_failed(self) -> None:
        """Call after a forward or backward pass has raised, which ends the training; local."""
        self.has_failed = True

    def require_no_failure(self) -> None:
        """Raise if a pass has raised: the ranks would communicate at different places. Local."""
        if self.has_failed:
            raise RuntimeError(
                "forward or backward has raised before, and the program goes on, but the other ranks may be at another "
                "place of their communication: a batch cannot be left out. Let the exception end the training, and "
                "resume from a checkpoint"
            )

    @abstractmethod
    def finish_gradients(self) -> None:
        """Finish the reduction of gradients after the last backward pass of a step; may be called again."""

    def begin_forward(self) -> None:
        """Call before a step of the model that is not entered through ``module.__call__``; local."""
        self.require_no_failure()

    def finish_parameters(self) -> None:  # noqa: B027
        """Wait for all new values; call it before anything but the model's forward reads parameters; local."""

    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Clip the gradients of an optimizer by one norm after :meth:`finish_gradients`; returns the norm before.

        Collective over the mesh.
        """
        return self.clip_norm_(parameters_of(optimizer), max_norm)

    def clip_norm_(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip as :meth:`clip_grad_norm_` does, for these parameters, in the same order on all ranks."""
        # sqrt((|g_1|^2 + ... + |g_R|^2) / R) of R decoupled nodes bounds the norm of the mean gradient from above, and
        # equals it if the nodes have equal gradients. The squares of the stages of a pipeline are added up, too.
        axes, across, device = (0,) if self.options.decoupled_nodes else (), ALONE, None
        root = math.sqrt(self.mesh.size(0)) if axes else 1.0
        if self.options.stages is not None:
            across = axis_group(self.options.stages, (0, *(1 + axis for axis in axes)))
            device = mesh_device(self.mesh)  # A stage may have none of the parameters.
        elif axes:
            across = axis_group(self.mesh, axes)
        max_norm, layout, copies = max_norm * root, self.layout, self.copies
        norm = clip_norm_(parameters, max_norm, layout=layout, across=across, device=device, copies=copies)
        return norm / root

    def reduce_part(self, modules: Sequence[nn.Module], scale: Tensor) -> None:
        """Reduce gradients that were summed inside of :meth:`no_sync`, each rank's times its ``scale``, over all ranks.

        Only called for modes that take ``roots``. This one, without other ranks, only scales.
        """
        for parameter in dict.fromkeys(p for module in modules for p in module.parameters()):
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    def close(self) -> None:  # noqa: B027
        """Remove all hooks; the model stays as it is. Local."""


def is_attachable(optimizer: Any) -> bool:
    """Whether an optimizer works on sharded parameters, as :class:`~lightning_muon.ParallelMuon` does."""
    return hasattr(optimizer, "routes")


def attach_optimizers(
    module: nn.Module,
    optimizers: Sequence[Any],
    layout: Layout | None,
    *,
    nodes: DeviceMesh | None = None,
) -> None:
    """Attach the optimizers that can be attached; all others make their own state. Local.

    ``nodes`` is the mesh if its replicas are decoupled.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        couples_nodes = hasattr(optimizer, "use_mesh")  # A FlexDeMo.
        if nodes is None and couples_nodes:
            raise ValueError(
                f"{name} exchanges updates between nodes itself, but here gradients are averaged over all ranks; set "
                "ModeOptions(decoupled_nodes=True), in a Trainer ParallelMuonStrategy(optimizer=FlexDeMoConfig(...))"
            )
        if nodes is not None and not couples_nodes:
            raise ValueError(
                f"with decoupled nodes {name} would step each node by its own gradients, and the nodes would drift "
                "apart; use FlexDeMo"
            )
        if nodes is not None:
            optimizer.use_mesh(nodes)
        if is_attachable(optimizer):
            optimizer.attach(module, layout)


@contextmanager
def joined_state_dicts() -> Generator[None]:
    """Context, or decorator, for what joins the state dicts of all ranks.

    ``module.state_dict()`` then has what this rank has of a pipeline, and main weights, as DTensors, in place of their
    roundings; with these it is collective over the mesh of the module.
    """
    token = JOINS_STATE_DICTS.set(True)
    try:
        yield
    finally:
        JOINS_STATE_DICTS.reset(token)


@torch.no_grad()
def broadcast_initial_state(module: nn.Module, mesh: DeviceMesh) -> None:
    """Overwrite weights and buffers with those of the first rank of the mesh; ``fully_shard`` does not do it.

    Collective over ``mesh`` and over the mesh of every DTensor. A tensor that is not on the meta device becomes equal
    along all axes over which it is not sharded, also those of tensor parallelism.
    """
    tensors = [tensor for tensor in _state(module) if not tensor.is_meta]
    device = mesh_device(mesh)
    for axes in (axis_group(mesh, tuple(range(mesh.ndim))), *groups_beside(module, mesh)):
        if axes.group is not None:
            ranks = set(dist.get_process_group_ranks(axes.group))
            # Tensors that are not sharded over these ranks, so that each of them has a copy.
            copies = [t for t in tensors if not isinstance(t, DTensor) or _only_this_rank(t.device_mesh, ranks)]
            broadcast([local_tensor(tensor) for tensor in copies], axes.group, device)
    groups: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            axes = tuple(axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate())
            groups.setdefault((tensor.device_mesh, axes), []).append(tensor.to_local())
    for (own_mesh, axes), shards in groups.items():
        group = axis_group(own_mesh, axes).group if axes else None
        if group is not None:
            broadcast(shards, group, device)


def groups_beside(module: nn.Module, mesh: DeviceMesh) -> list[AxisGroup]:
    """The axes of tensor parallelism: those of the DTensors in ``module`` that share only this rank with ``mesh``."""
    found: dict[tuple[int, ...], AxisGroup] = {}
    for own_mesh in dict.fromkeys(tensor.device_mesh for tensor in _state(module) if isinstance(tensor, DTensor)):
        for axis in range(own_mesh.ndim):
            axes = axis_group(own_mesh, (axis,))
            if axes.group is not None:
                ranks = tuple(dist.get_process_group_ranks(axes.group))
                if _only_this_rank(mesh, set(ranks)):
                    found.setdefault(ranks, axes)
    return list(found.values())


def _only_this_rank(mesh: DeviceMesh, ranks: set[int]) -> bool:
    return ranks.intersection(mesh.mesh.flatten().tolist()) == {dist.get_rank()}


def _state(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers, each once."""
    return list(dict.fromkeys((*module.parameters(), *module.buffers())))


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank takes part in the collectives of ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Overwrite tensors with those of the first rank, sent in buckets on ``device``. Collective over ``group``."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in by_dtype.values():
        ends = accumulate(tensor.nbytes for tensor in same_dtype)
        for _, pairs in groupby(zip(same_dtype, ends, strict=True), key=lambda pair: pair[1] // _BROADCAST_BYTES):
            bucket = [tensor for tensor, _ in pairs]
            flat = torch.cat([tensor.detach().to(device).reshape(-1) for tensor in bucket])
            # Send bytes, so that backends without complex, bool or float8 can send those, too.
            dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))


def names_of(module: nn.Module) -> dict[str, Tensor]:
    """First name of each parameter, without the parts that wrappers add -> parameter."""
    return {uses[0].name: uses[0].parameter for uses in parameter_uses(module)}


@torch.no_grad()
def broadcast_buffers(module: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Give all ranks the buffers of the first one, as DDP does. Collective over ``mesh``, by default over all ranks."""
    buffers = [buffer for buffer in module.buffers() if not isinstance(buffer, DTensor)]
    is_alone = (dist.get_world_size() if mesh is None else mesh.size()) == 1
    if buffers and not is_alone:
        group = None if mesh is None else axis_group(mesh, tuple(range(mesh.ndim))).group
        broadcast(buffers, group, buffers[0].device)
