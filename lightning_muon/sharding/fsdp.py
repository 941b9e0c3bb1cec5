"""``sharding="fsdp"``: parameters, gradients and optimizer state sharded with FSDP2, and replicated between nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef
from typing_extensions import override

from lightning_muon.comm.groups import axis_group, host_group
from lightning_muon.comm.step_agreement import StepAgreement
from lightning_muon.grad_sync.clipping import clip_norm_
from lightning_muon.sharding.fsdp_call_log import NO_WORD, FsdpCallLog
from lightning_muon.sharding.fsdp_recovery import Recovery
from lightning_muon.sharding.fsdp_runtime import (
    MicroBatches,
    fsdp_modules,
    initialize_roots,
    let_gathers_start,
    own_places,
    set_gradient_divisor,
)
from lightning_muon.sharding.mode import Attachable, ModeOptions, ShardingMode, attach_optimizers
from lightning_muon.sharding.shard_model import shard_axis, shard_model
from lightning_muon.sharding.weights import mesh_device


class GradientAgreement:
    """Makes gradients after the last backward pass of a step equal in meaning on all ranks.

    FSDP2 reduces the gradients of a unit together. A parameter that one rank uses and another does not makes their
    messages differ in size, and the ranks hang. So units fill in zeros, and this class remembers which parameters
    really were used: a gradient that no rank has computed is removed again, because a zero gradient would still decay
    the weight. A unit whose forward runs on some ranks only is beyond help: its all-gather has no partner, or a wrong
    one. Ranks that ran different units get the same error; for those that wait there is
    :class:`lightning_muon.monitor.watchdog.Watchdog`.

    Collective over ``mesh``; every rank must construct it, with weights materialized (each unit is gathered once).

    Args:
        module: A model with units.
        mesh: The ranks with batches of their own.
        call_log: The units that this rank has run in this step, if they are watched already; :meth:`close` ends that.
        nodes: The (replicate, shard) mesh, if ``mesh`` is the shard axis of a decoupled node.

    Attributes:
        step: Sends what the ranks have to tell each other.

    Example::

        shard_model(model, mesh)
        agreement = GradientAgreement(model, mesh)
        model(batch).sum().backward()
        agreement.finish()
        optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        call_log: FsdpCallLog | None = None,
        *,
        nodes: DeviceMesh | None = None,
    ) -> None:
        self._module = module
        self._everyone = axis_group(mesh, tuple(range(mesh.ndim)))
        whole = mesh if nodes is None else nodes
        self.step = StepAgreement(host_group(axis_group(whole, tuple(range(whole.ndim)))))
        self._node, self._num_nodes = (0, 1) if nodes is None else (nodes.get_local_rank(0), nodes.size(0))
        self.call_log = call_log or FsdpCallLog(module, mesh)
        self._scalars = _ReducedScalars()
        self._device = mesh_device(mesh)
        self._places: list[tuple[nn.Module, str]] = []
        self._parameters: list[Tensor] = []
        self._used: list[bool] = []
        self._agreed: dict[int, TensorWeakRef] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._zeros: _Zeros = {}
        if self._everyone.group is not None:
            initialize_roots(module)
            for unit in fsdp_modules(module):
                self._watch(unit)

    def finish(self, divisor: float | None = None, *, is_deferred: bool = False) -> None:
        """Average the gradients of 0-d parameters, and remove gradients that no rank has computed.

        Collective over the mesh; every rank must call it, after the last backward pass of a step, before clipping.

        Args:
            divisor: What the sums over the ranks are divided by, as :func:`set_gradient_divisor` has told the units;
                ``None``: the number of ranks.
            is_deferred: Leave the comparison of the ranks to the next message of :attr:`step`, which an optimizer
                sends. Until then gradients that no rank has computed are zeros. Not for models with 0-d parameters.

        Raises:
            RuntimeError: On every rank, if the ranks have run different units. The weights are unchanged, the gradients
                worthless. Raised by whoever sends the message.
        """
        if self._everyone.group is not None:
            self._parameters = [getattr(owner, attribute) for owner, attribute in self._places]
            self.call_log.mark("end")
            self.step.post(self)
            if not is_deferred or _plain_scalars(self._module):
                self.step.reduce(())
        average_scalar_gradients(self._module, self._everyone.group, self._device, divisor, reduced=self._scalars)

    def numbers(self) -> list[int]:
        """The calls of units, and for each parameter whether this rank has used it; in the place of its node."""
        # Gradients may be accumulated over several steps: one that was kept before is kept until it is replaced.
        used = [
            was_used or (index in self._agreed and self._agreed[index]() is parameter.grad is not None)
            for index, (was_used, parameter) in enumerate(zip(self._used, self._parameters, strict=True))
        ]
        own = [*self.call_log.words(), *used]
        before, after = self._node * len(own), (self._num_nodes - self._node - 1) * len(own)
        return [*[NO_WORD] * before, *own, *[NO_WORD] * after]

    def settle(self, maxima: Sequence[int]) -> list[Tensor]:
        """Remove gradients that no rank has computed; see :class:`~lightning_muon.comm.step_agreement.Rider`."""
        size, num_words = len(maxima) // self._num_nodes, len(self.call_log.words())
        nodes = [maxima[start : start + size] for start in range(0, len(maxima), size)]
        own = nodes[self._node]
        self.call_log.require_equal(own[:num_words], self._everyone)
        if any(self.call_log.differs(each[:num_words]) for each in nodes):
            raise RuntimeError("The ranks of another node run different units of the model; see the error of its ranks")
        self._agreed = {}
        unused: list[Tensor] = []
        for index, (parameter, was_used) in enumerate(zip(self._parameters, own[num_words:], strict=True)):
            if not was_used:
                parameter.grad = None
                unused.append(parameter)
            elif parameter.grad is not None:
                self._agreed[index] = TensorWeakRef(parameter.grad)
        self.forget()
        return unused

    def forget(self) -> None:
        """The gradients of this step have been dropped; local, to be called alike on all ranks."""
        self._used[:] = [False] * len(self._used)

    def close(self) -> None:
        """Remove the hooks; local."""
        self.call_log.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._places.clear()

    def _watch(self, unit: FSDPModule) -> None:
        """Hook the whole weights of a unit, which exist from the first all-gather on and are reused from then on."""
        places = own_places(unit)
        frozen = [not getattr(owner, attribute).requires_grad for owner, attribute in places]
        wholes: list[Tensor] = []
        unit.unshard()
        for (owner, attribute), is_frozen in zip(places, frozen, strict=True):
            whole = getattr(owner, attribute)
            if not whole.is_floating_point():
                continue
            # Frozen weights are watched too, because they may be unfrozen later.
            whole.requires_grad_(True)
            self._hooks.append(whole.register_post_accumulate_grad_hook(self._marker(len(self._places))))
            if not hasattr(unit, "set_reduce_scatter_unused_params"):
                self._hooks.append(whole.register_hook(partial(_make_room, TensorWeakRef(whole), self._zeros)))
            whole.requires_grad_(not is_frozen)
            self._places.append((owner, attribute))
            self._used.append(False)
            wholes.append(whole)
        unit.reshard()
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        else:  # Before torch 2.13.
            self.call_log.before_backward[unit] = partial(_fill_with_zeros, wholes, self._zeros)

    def _marker(self, index: int) -> Callable[[Tensor], None]:
        # Not self: Python's garbage collector does not look into the hooks of tensors, so that the model, and with it
        # its process groups, would live for ever.
        used = self._used

        def mark(_: Tensor) -> None:
            used[index] = True

        return mark


# Whole weights by their number -> a gradient of zeros that takes no memory.
_Zeros = dict[int, Tensor]


def _fill_with_zeros(wholes: Sequence[Tensor], zeros: _Zeros) -> None:
    """Give whole weights without a gradient one of zeros, so that FSDP2 reduces them on all ranks."""
    for whole in wholes:
        if whole.requires_grad and whole.grad is None:
            zeros[id(whole)] = torch.zeros((), dtype=whole.dtype, device=whole.device).expand(whole.shape)
            whole.grad = zeros[id(whole)]


def _make_room(reference: TensorWeakRef, zeros: _Zeros, gradient: Tensor) -> None:
    """Backward is about to add ``gradient``: to nothing, where there are but the zeros that take no memory."""
    del gradient
    whole = reference()
    if whole is not None and zeros.pop(id(whole), None) is whole.grad:
        whole.grad = None


class _ReducedScalars:
    """Remembers which gradients hold results already, so that only what has been added since is summed again."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[TensorWeakRef, Tensor]] = {}

    def share_of(self, parameter: nn.Parameter) -> Tensor:
        """The result that is part of the gradient, zero if there is none."""
        reference, value = self._kept.get(id(parameter), (None, torch.zeros((), device="cpu")))
        return value if reference is not None and reference() is parameter.grad else torch.zeros((), device="cpu")

    def keep(self, parameter: nn.Parameter) -> None:
        """Remember that the gradient is a result."""
        if parameter.grad is not None:
            self._kept[id(parameter)] = TensorWeakRef(parameter.grad), parameter.grad.detach().cpu().clone()


def average_scalar_gradients(
    module: nn.Module,
    group: dist.ProcessGroup | None,
    device: torch.device,
    divisor: float | None = None,
    *,
    reduced: _ReducedScalars | None = None,
) -> None:
    """Replace the gradients of 0-d parameters, which FSDP2 leaves out, by (their sum over the ranks) / ``divisor``.

    Collective over ``group`` (``None``: this process is alone); every rank must call it. A missing gradient counts as
    zero unless it is missing everywhere. Without a divisor it is the mean, and calling it again changes nothing; with
    one, and the same ``reduced``, only what was added since the last call is summed.
    """
    scalars = _plain_scalars(module)
    size = 1 if group is None else dist.get_world_size(group)
    if not scalars or (group is None and divisor is None):
        return
    reduced = reduced or _ReducedScalars()
    # (kept result, what was added to it, whether there is a gradient) x parameters
    dtype = torch.float64 if _has_double(scalars) else torch.float32
    packed = torch.zeros(3, len(scalars), dtype=dtype, device="cpu")
    for column, parameter in enumerate(scalars):
        if parameter.grad is not None:
            packed[0, column] = reduced.share_of(parameter)
            packed[1, column] = parameter.grad.cpu() - packed[0, column]
            packed[2, column] = 1.0
    packed = packed.to(device)
    if group is not None:
        dist.all_reduce(packed, group=group)
    kept, added, present = (packed / torch.tensor([[size], [divisor or size], [1]], device=device)).cpu().unbind()
    for index, parameter in enumerate(scalars):
        if present[index] > 0:
            parameter.grad = (kept + added)[index].to(parameter)
            reduced.keep(parameter)


def _plain_scalars(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.ndim == 0 and p.requires_grad and not isinstance(p, DTensor)]


def _has_double(parameters: Sequence[nn.Parameter]) -> bool:
    return any(parameter.dtype == torch.float64 for parameter in parameters)


class Fsdp(ShardingMode):
    """FSDP2 over the last axis of the mesh, replicas over the other; parts that the user sharded are left alone.

    With ``decoupled_nodes`` the mesh is (replicate, shard), and FSDP2 sees the shard axis of each node only. Initial
    weights still come from the first rank of all. Gradients are those of the node; their meaning is such that the mean
    over the nodes is what all ranks would have computed together. What one node runs is no business of the others.
    """

    name = "fsdp"
    shards_weights = True
    takes = frozenset(
        {"wrap_policy", "reshard_after_forward", "reshard_after_backward", "early_all_gather", "decoupled_nodes"}
    )

    def __init__(self, mesh: DeviceMesh, options: ModeOptions) -> None:
        super().__init__(mesh, options)
        self._divisor: float | None = None
        self._agreement: GradientAgreement | None = None
        self._recovery: Recovery | None = None
        # The ranks whose gradients FSDP2 averages.
        self._reduced_over = shard_axis(mesh) if options.decoupled_nodes else mesh
        self._num_nodes = mesh.size() // self._reduced_over.size()
        self._is_deferred = False

    @override
    def prepare(self, module: nn.Module) -> None:
        options = self.options
        shard_model(
            module,
            self.mesh,
            wrap_policy=options.wrap_policy,
            mp_policy=options.mp_policy,
            reshard_after_forward=options.reshard_after_forward,
            shard_root=options.shard_root,
            decoupled_nodes=options.decoupled_nodes,
        )
        initialize_roots(module)

    def watch(self, module: nn.Module) -> None:
        """Note the units that ``module``, as prepared, runs from now on, in trainings and evaluations."""
        if self._call_log is None:
            self._everyone = axis_group(self._reduced_over, tuple(range(self._reduced_over.ndim)))
            self._host = host_group(self._everyone)
            self._call_log = FsdpCallLog(module, self._reduced_over)
            self._recovery = Recovery(module, self._reduced_over, self._call_log)

    @override
    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        self._module = module
        self._micro_batches = MicroBatches(module, reshard_after_backward=self.options.reshard_after_backward)
        self.watch(module)
        nodes = self.mesh if self.options.decoupled_nodes else None
        self._agreement = GradientAgreement(module, self._reduced_over, self._call_log, nodes=nodes)
        assert self._recovery is not None
        self._recovery.gradients_dropped = self._agreement.forget
        # An optimizer that sends a message of its own before each step takes along what FSDP2 has to compare.
        self._is_deferred = all(isinstance(optimizer, Attachable) for optimizer in optimizers)
        attach_optimizers(module, optimizers, layout=None, nodes=nodes, step=self._agreement.step)

    @override
    def no_sync(self) -> AbstractContextManager[None]:
        return self._micro_batches.without_sync()

    @override
    def set_gradient_divisor(self, divisor: float | None) -> None:
        if divisor is not None:
            divisor /= self._num_nodes  # The average over nodes supplies that factor.
        if divisor != self._divisor:
            set_gradient_divisor(self._module, divisor)
            self._divisor = divisor

    @override
    def backward_failed(self) -> None:
        if self._recovery is not None:
            self._recovery.failed(in_backward=True)

    @override
    def forward_failed(self) -> None:
        if self._recovery is not None:
            self._recovery.failed(in_backward=False)

    @override
    def finish_gradients(self) -> None:
        assert self._agreement is not None and self._recovery is not None, "attach comes first"
        self._recovery.resume()
        self._micro_batches.finish()
        self._agreement.finish(self._divisor, is_deferred=self._is_deferred)

    def clip_norm_(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """As in :class:`ShardingMode`; of R decoupled nodes the norm is sqrt((|g_1|^2 + ... + |g_R|^2) / R).

        It bounds the norm of the mean gradient from above, equals it if the nodes have equal gradients, and is the same
        on all nodes, which are scaled alike.
        """
        if self._num_nodes == 1:
            return super().clip_norm_(parameters, max_norm)
        root = math.sqrt(self._num_nodes)
        across = axis_group(self.mesh, (0,))
        return clip_norm_(parameters, max_norm * root, layout=self.layout, across=across) / root

    def finish_evaluation(self) -> None:
        """Compare the units that the ranks have run since the last step or evaluation; after each evaluation.

        Raises:
            RuntimeError: On every rank, if ranks that share weights have run different units.
        """
        if self._call_log is not None and self._recovery is not None:
            self._recovery.resume()
            self._call_log.compare(self._everyone, self._host)

    @override
    def end_step(self) -> None:
        if self.options.early_all_gather and self.mesh.device_type == "cuda":
            let_gathers_start(self._module)

    @override
    def close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None
        if self._recovery is not None:
            self._recovery.close()
            self._recovery = None
        self._end_watch()
