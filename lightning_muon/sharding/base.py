"""What every way of sharding parameters, gradients and optimizer state does for a training loop."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_muon.comm.groups import ALONE, axis_group, shard_axis
from lightning_muon.params.layout import Layout, parameters_of
from lightning_muon.sharding.clipping import clip_norm_
from lightning_muon.sharding.units import WrapPolicy
from lightning_muon.sharding.weights import mesh_device

T = TypeVar("T")
BucketBytes = int | Literal["auto"]
Accumulate = Literal["sharded", "whole"]


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
        self.reduced_over = shard_axis(mesh) if options.decoupled_nodes else mesh
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
