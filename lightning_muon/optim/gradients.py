"""What all ranks must know of the gradients before a step: who has one, and whether all are finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_muon.comm.exchange import start_all_reduce_sum
from lightning_muon.comm.mesh import AxisGroup, axis_group
from lightning_muon.errors import NonFiniteGradientError
from lightning_muon.optim.binding import Binding, local_tensor
from lightning_muon.optim.early import EarlyGathers, gradient_norms
from lightning_muon.optim.matrix_step import Gradients
from lightning_muon.optim.meshes import MeshMembers
from lightning_muon.params.layout import mesh_and_placements


@dataclass(frozen=True, eq=False)
class Agreement:
    """What all ranks know, equal on all of them but for the tensors.

    Attributes:
        gradients: Local gradient of every parameter that takes part in the step.
        valid_early: Chunks whose early gather counts.
        verdict: Where finding out takes a device (CUDA): waits for it, and raises as :func:`agree_on_gradients` does.
    """

    gradients: Gradients
    valid_early: frozenset[str]
    verdict: Callable[[], None] | None = None


@dataclass
class _Findings:
    """What the meshes looked at so far have found out; the next, larger mesh is told."""

    is_stale: bool
    must_stop: bool = False
    nonfinite: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    void: tuple[str, ...] = ()
    partly: tuple[tuple[MeshMembers, Tensor], ...] = ()


def agree_on_gradients(
    binding: Binding, early: EarlyGathers | None, *, error_if_nonfinite: bool, is_stale: bool
) -> Agreement | None:
    """Which parameters have a gradient on any rank of their mesh; zeros stand in where only this rank has none.

    A replicated parameter that only some replicas have a gradient for gets the mean over all of them. Collective over
    every mesh of the parameters, one after the other (one small all-reduce each in host memory, which the host waits
    for); every rank of it must call it.

    Args:
        binding: Meshes and names; a stale one will do.
        early: What was sent during backward; it is settled whatever the outcome.
        error_if_nonfinite: Look for NaN and Inf.
        is_stale: Whether this rank needs a new plan.

    Returns:
        ``None`` on all ranks if any of them needs a new plan.

    Raises:
        NonFiniteGradientError: On all ranks, with the names of the parameters, if the norm of a gradient is NaN or Inf.
        TypeError: On all ranks, if a gradient is sparse or complex.
    """
    found: Gradients = {}
    findings = _Findings(is_stale=is_stale)
    on_host = binding.device.type == "cpu"
    for members in binding.meshes:
        _agree_on_mesh(members, binding.names, found, findings, early, check=error_if_nonfinite and on_host)
    valid = _valid_early(findings, early)
    if early is not None:
        early.settle(findings.sent, valid, found)
    _raise_if_needed(findings)
    if findings.is_stale:
        return None
    for members, tensor in findings.partly:
        _fill_in(members, tensor, found)
    verdict = _verdict_of_device(binding, found) if error_if_nonfinite and not on_host else None
    return Agreement(found, valid, verdict)


def _agree_on_mesh(
    members: MeshMembers,
    names: Mapping[Tensor, str],
    found: Gradients,
    findings: _Findings,
    early: EarlyGathers | None,
    *,
    check: bool,
) -> None:
    """Add the local gradients to ``found`` and what the mesh knows to ``findings``."""
    tensors, num = members.tensors, len(members.tensors)
    have = [tensor.requires_grad and tensor.grad is not None for tensor in tensors]
    unusable = [has and _is_unusable(tensor.grad) for tensor, has in zip(tensors, have, strict=True)]
    for tensor, has, bad in zip(tensors, have, unusable, strict=True):
        if has and not bad:
            found[tensor] = _local_gradient(tensor)
    norms = _norms(tensors, found) if check else {}
    nonfinite = [tensor in norms and not norms[tensor].isfinite() for tensor in tensors]
    keys = early.keys(set(tensors)) if early is not None else []
    sent = [early.is_sent(key) for key in keys] if early is not None else []
    void = [early.is_changed(key, norms) for key in keys] if early is not None else []
    flags = [*have, *unusable, *nonfinite, *sent, *void, findings.is_stale, findings.must_stop]
    counts = torch.tensor(flags, dtype=torch.int32)
    if members.host.group is not None:
        start_all_reduce_sum(counts, members.host).wait()
    values = iter(counts.tolist())
    present, bad, infinite = (list(islice(values, num)) for _ in range(3))
    findings.sent += tuple(key for key, count in zip(keys, islice(values, len(keys)), strict=True) if count)
    findings.void += tuple(key for key, count in zip(keys, islice(values, len(keys)), strict=True) if count)
    stale, stop = values
    findings.unusable += tuple(names[tensor] for tensor, count in zip(tensors, bad, strict=True) if count)
    findings.nonfinite += tuple(names[tensor] for tensor, count in zip(tensors, infinite, strict=True) if count)
    findings.is_stale = findings.is_stale or stale > 0
    findings.must_stop = findings.must_stop or stop > 0 or any(bad) or any(infinite)
    partly = [tensor for tensor, count in zip(tensors, present, strict=True) if 0 < count < members.axes.size]
    findings.partly += tuple((members, tensor) for tensor in partly)


def _valid_early(findings: _Findings, early: EarlyGathers | None) -> frozenset[str]:
    """Chunks that were sent, and that no rank has seen a change of."""
    if early is None or findings.is_stale or findings.must_stop:
        return frozenset()
    # The mean over the replicas, which _fill_in takes, is another gradient than the one that was sent.
    averaged = {tensor for members, tensor in findings.partly if _replicas(members, tensor) is not None}
    return frozenset(findings.sent) - frozenset(findings.void) - frozenset(early.keys_of(averaged))


def _is_unusable(grad: Tensor | None) -> bool:
    return grad is not None and (grad.is_sparse or grad.is_complex())


def _local_gradient(tensor: Tensor) -> Tensor:
    grad = tensor.grad
    assert grad is not None
    if isinstance(grad, DTensor) and isinstance(tensor, DTensor) and grad.placements != tensor.placements:
        # A partial sum, for example: reduced here as torch's own optimizers do it, on all ranks.
        grad = grad.redistribute(placements=tensor.placements)
    return local_tensor(grad).to(tensor.dtype)


def _norms(tensors: Sequence[Tensor], found: Gradients) -> dict[Tensor, Tensor]:
    """Norm of each local gradient that has elements."""
    filled = [tensor for tensor in tensors if tensor in found and found[tensor].numel()]
    # The 2-norm, since the infinity norm and isfinite are 15 to 20 times slower on a CPU.
    return dict(zip(filled, gradient_norms([found[tensor] for tensor in filled]), strict=True))


def _verdict_of_device(binding: Binding, found: Gradients) -> Callable[[], None]:
    """Begin to look for NaN and Inf on the device; the result waits for the device and raises.

    Collective over every mesh of the parameters; every rank of it must call it.
    """
    results: list[tuple[MeshMembers, Tensor]] = []
    stop = torch.zeros(1, dtype=torch.int32, device=binding.device)
    for members in binding.meshes:
        norms = _norms(members.tensors, found)
        flags = torch.zeros(len(members.tensors) + 1, dtype=torch.int32, device=binding.device)
        places = [index for index, tensor in enumerate(members.tensors) if tensor in norms]
        if places:
            finite = torch.stack([norm.float() for norm in norms.values()]).isfinite()
            flags[places] = finite.logical_not().int()
        flags[-1:] = stop
        if members.axes.group is not None:
            start_all_reduce_sum(flags, members.axes).wait()
        stop = flags.max().reshape(1).clamp(max=1)
        results.append((members, flags))

    def verdict() -> None:
        findings = _Findings(is_stale=False)
        for members, flags in results:
            *counts, stopped = flags.tolist()
            bad = [tensor for tensor, count in zip(members.tensors, counts, strict=True) if count]
            findings.nonfinite += tuple(binding.names[tensor] for tensor in bad)
            findings.must_stop |= bool(bad) or stopped > 0
        _raise_if_needed(findings)

    return verdict


def _replicas(members: MeshMembers, tensor: Tensor) -> AxisGroup | None:
    """The other ranks that hold the same part of a parameter, ``None`` if there are none.

    Collective over them the first time; every rank of the mesh must call it.
    """
    mesh, placements = mesh_and_placements(tensor, members.mesh)
    replicated = tuple(axis for axis, placement in enumerate(placements) if isinstance(placement, Replicate))
    if mesh is None or not replicated:
        return None
    replicas = axis_group(mesh, replicated)
    return replicas if replicas.group is not None else None


def _fill_in(members: MeshMembers, tensor: Tensor, found: Gradients) -> None:
    """Zeros where this rank has no gradient; replicas then take their mean, so that they stay equal.

    Collective over the replicas; every rank of the mesh must call it.
    """
    if tensor not in found:
        found[tensor] = torch.zeros_like(local_tensor(tensor))
    replicas = _replicas(members, tensor)
    if replicas is not None:
        found[tensor] = found[tensor].clone()
        dist.all_reduce(found[tensor], group=replicas.group)
        found[tensor].div_(replicas.size)


def _raise_if_needed(findings: _Findings) -> None:
    if findings.unusable:
        raise TypeError(
            f"the gradient of {_listed(findings.unusable)} is sparse or complex; ParallelMuon takes dense real "
            "ones. For an embedding, set sparse=False"
        )
    if findings.must_stop:
        where = _listed(findings.nonfinite) if findings.nonfinite else "a parameter of another mesh"
        raise NonFiniteGradientError(
            f"NaN or Inf in the norm of the gradient of {where}. The step was not taken: weights and optimizer state "
            "are unchanged on all ranks. Lower the learning rate, clip gradients, or look for a bad batch; "
            "error_if_nonfinite=False turns the check off."
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
