"""What all ranks must know of the gradients before a step: who has one, and whether all are finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import Message, are_equal, both_signs, maxima_over
from lightning_muon.comm.collectives import axis_group, start_all_reduce_sum, start_reading
from lightning_muon.config import join_names
from lightning_muon.errors import NonFiniteGradientError
from lightning_muon.math.norms import local_norms
from lightning_muon.optim.parameters import Gradients, hyperparameter_digest
from lightning_muon.optim.step_plan import StepPlan
from lightning_muon.params.layout import Layout, MeshMembers, local_tensor, replicated_axes


@dataclass(eq=False)
class GradientsAreNotFinite(Exception):  # noqa: N818 - no error yet: the step is skipped
    """Some rank has a NaN or an Inf; raised on all ranks, with nothing changed."""

    names: tuple[str, ...]


# Key of an option of the first param group, and so in each saved state: steps that were skipped, in all and in a row.
_SKIPPED = "skipped_steps"


def skipped_steps(optimizer: torch.optim.Optimizer) -> int:
    """Steps of ``optimizer`` that were skipped for a NaN or Inf, also before it was loaded; local."""
    return optimizer.param_groups[0].get(_SKIPPED, (0, 0))[0]


def skips_step(optimizer: torch.optim.Optimizer, nonfinite_names: Sequence[str], *, most_in_a_row: int = 0) -> bool:
    """Whether to skip the step, which is counted; raises after too many. Local with the same names."""
    group = optimizer.param_groups[0]
    total, in_a_row = group.get(_SKIPPED, (0, 0))
    if not nonfinite_names:
        if in_a_row:
            group[_SKIPPED] = total, 0
        return False
    if in_a_row < most_in_a_row:
        group[_SKIPPED] = total + 1, in_a_row + 1
        return True
    names = join_names(nonfinite_names)
    if in_a_row:
        names += f", after {in_a_row} skipped steps in a row ({total} in all)"
    raise NonFiniteGradientError(
        f"NaN or Inf in the norm of the gradient of {names}. The step was not taken: weights and "
        "optimizer state are unchanged on all ranks. Lower the learning rate, clip gradients, or look for a bad "
        f"batch; max_skipped_steps={most_in_a_row} says how many such steps in a row may be skipped."
    )


@dataclass(kw_only=True)
class _Flags(Message):
    """What a rank knows of the parameters of one mesh; the maxima over the ranks are what any of them knows."""

    # One for each parameter.
    has: list[int]
    lacks: list[int]
    is_unusable: list[int]
    is_unreduced: list[int]
    is_nonfinite: list[int] = field(default_factory=list[int])
    # One for the optimizer.
    is_stale: int = 0
    must_stop: int = 0
    backward_has_failed: int = 0
    lacks_sums: int = 0
    hyperparameters: list[int]  # A digest in both signs.


@dataclass
class _Findings:
    """What was found on the meshes so far; the next, larger mesh is told."""

    is_stale: bool
    backward_has_failed: bool
    lacks_sums: bool
    must_stop: bool = False
    nonfinite: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()
    partly: tuple[Tensor, ...] = ()
    unreduced: tuple[Tensor, ...] = ()

    def add(self, flags: _Flags, members: MeshMembers, plan: StepPlan) -> None:
        """Add what any rank of a mesh knows; local."""
        tensors, names = members.tensors, [plan.names[tensor] for tensor in members.tensors]
        partly = [has and lacks for has, lacks in zip(flags.has, flags.lacks, strict=True)]
        # A partial sum is reduced by all ranks, or by none.
        partial_sums = zip(flags.is_unusable, flags.is_unreduced, partly, strict=True)
        unusable = [bad or (is_sum and some) for bad, is_sum, some in partial_sums]
        self.unusable += tuple(compress(names, unusable))
        self.nonfinite += tuple(compress(names, flags.is_nonfinite))
        self.partly += tuple(compress(tensors, partly))
        self.unreduced += tuple(compress(tensors, flags.is_unreduced))
        # If hyper-parameters differ between ranks, making a new plan raises and names the difference.
        self.is_stale |= bool(flags.is_stale) or not are_equal(flags.hyperparameters)
        self.backward_has_failed = bool(flags.backward_has_failed)
        self.lacks_sums = bool(flags.lacks_sums)
        self.must_stop |= bool(flags.must_stop) or any(unusable) or any(flags.is_nonfinite)


def agree_on_gradients(
    plan: StepPlan,
    *,
    error_if_nonfinite: bool,
    is_stale: bool,
    nonfinite_elsewhere: Tensor | None = None,
) -> Gradients | None:
    """Find the parameters with a gradient on any rank of their mesh; zeros stand in where only this rank has none.

    Returns ``None`` on all ranks if any needs a new plan (``is_stale``). ``nonfinite_elsewhere``, a bool on the device,
    says that another stage of a pipeline has one. The host waits for the device here, and nowhere else in a step.
    Collective over every mesh of the parameters, the smallest first.
    """
    layout, found = plan.layout, dict[Tensor, Tensor]()
    for tensor in (tensor for members in plan.meshes for tensor in members.tensors):
        if tensor.requires_grad and not _is_unusable(tensor.grad):
            gradient = layout.gradient(tensor)
            found |= {} if gradient is None else {tensor: gradient.to(layout.dtype(tensor))}
    checked = [_nonfinite(members.tensors, found, plan.device) for members in plan.meshes if error_if_nonfinite]
    elsewhere = [nonfinite_elsewhere] if error_if_nonfinite and nonfinite_elsewhere is not None else []
    read = start_reading([*checked, *elsewhere])
    flags = [_local_flags(members, plan, found) for members in plan.meshes]  # While the device runs backward.
    values = iter(read())  # The host waits once.
    nonfinite: list[list[int]] = [next(values) if checked else [0] * len(each.tensors) for each in plan.meshes]

    must_stop = any(is_found for (is_found,) in values)
    findings = _Findings(is_stale, layout.backward_has_failed(), not layout.has_sums(), must_stop)
    for members, own, of_mesh in zip(plan.meshes, flags, nonfinite, strict=True):
        own.is_nonfinite, own.is_stale, own.must_stop = of_mesh, findings.is_stale, findings.must_stop
        own.backward_has_failed, own.lacks_sums = findings.backward_has_failed, findings.lacks_sums
        findings.add(own.unpack(maxima_over(members.host, own.pack())), members, plan)
    _raise_if_needed(findings)
    if findings.is_stale:
        return None
    _raise_if_lost(findings)
    for tensor in findings.unreduced:
        found[tensor] = _reduced(tensor)
    for tensor in findings.partly:
        _fill_in(layout, tensor, found)
    return found


def _local_flags(members: MeshMembers, plan: StepPlan, found: Gradients) -> _Flags:
    """The flags of this rank, but for what the device and smaller meshes have found; local."""
    tensors = members.tensors
    unusable = [tensor.requires_grad and _is_unusable(tensor.grad) for tensor in tensors]
    has = [tensor in found or is_unusable for tensor, is_unusable in zip(tensors, unusable, strict=True)]
    return _Flags(
        has=[*has],
        lacks=[not each for each in has],
        is_unusable=[*unusable],
        is_unreduced=[each and _is_unreduced(tensor) for tensor, each in zip(tensors, has, strict=True)],
        hyperparameters=both_signs([hyperparameter_digest(plan.groups_of[members])]),
    )


def _nonfinite(tensors: Sequence[Tensor], found: Gradients, device: torch.device) -> Tensor:
    """Whether each gradient of the calling rank has a NaN or an Inf, or a norm that overflows; bools on the device."""
    filled = [tensor for tensor in tensors if tensor in found and found[tensor].numel()]
    norms = dict(zip(filled, local_norms([found[tensor] for tensor in filled], is_exact=False), strict=True))
    fine = torch.zeros((), device=device)
    # All at once: one operation per norm would take a quarter of a step with many small parameters.
    return torch.stack([norms.get(tensor, fine) for tensor in tensors]).isfinite().logical_not()


def _is_unusable(grad: Tensor | None) -> bool:
    """Whether a gradient is of a kind that no step takes."""
    return grad is not None and (grad.is_complex() or grad.is_sparse)


def _is_unreduced(tensor: Tensor) -> bool:
    """Whether the gradient has other placements than its parameter (a partial sum): all ranks must reduce it."""
    grad = tensor.grad
    return isinstance(grad, DTensor) and isinstance(tensor, DTensor) and grad.placements != tensor.placements


def _reduced(tensor: Tensor) -> Tensor:
    """The local gradient, reduced where the program has left a partial sum, as torch's own optimizers do.

    Collective over the mesh of ``tensor``; all of its ranks have such a gradient.
    """
    assert isinstance(tensor.grad, DTensor) and isinstance(tensor, DTensor)
    return local_tensor(tensor.grad.redistribute(placements=tensor.placements)).to(tensor.dtype)


def _fill_in(layout: Layout, tensor: Tensor, found: Gradients) -> None:
    """Put zeros for a missing gradient; then average over replicas. Collective over these."""
    if tensor not in found:
        found[tensor] = torch.zeros_like(layout.local(tensor))
    mesh, placements = layout.mesh_and_placements(tensor)
    axes = () if mesh is None else replicated_axes(mesh, placements)
    if mesh is not None and axes:
        replicas = axis_group(mesh, axes)
        found[tensor] = found[tensor].clone()
        start_all_reduce_sum(found[tensor], replicas).wait()
        found[tensor].div_(replicas.size)


def _raise_if_needed(findings: _Findings) -> None:
    if findings.unusable:
        raise TypeError(
            f"the gradient of {join_names(findings.unusable)} is sparse or complex, or a partial sum that only some "
            "ranks have; ParallelMuon takes dense real ones, and partial sums only from all ranks. For an embedding, "
            "set sparse=False"
        )
    if findings.must_stop:
        raise GradientsAreNotFinite(findings.nonfinite or ("a parameter of another mesh or stage, or in the loss",))


def _raise_if_lost(findings: _Findings) -> None:
    if findings.backward_has_failed:
        raise RuntimeError(
            "a backward pass has raised, and the program went on: FSDP2 is still in the middle of that pass and has "
            "not reduced all gradients since, so that some parameters would never be updated again. Call "
            "model.reset_iter_state() on every rank where the exception is caught (torch 2.13), then "
            "optimizer.zero_grad()"
        )
    if findings.lacks_sums:
        raise RuntimeError(
            "backward has added to gradients that were not summed over the ranks since: call mode.finish_gradients() "
            "after the last backward pass of a step"
        )
