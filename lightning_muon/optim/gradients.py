"""What all ranks must know of the gradients before a step: who has one, and whether all are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.exchange import start_all_reduce_max
from lightning_muon.comm.mesh import AxisGroup
from lightning_muon.errors import NonFiniteGradientError
from lightning_muon.optim.binding import Binding, BoundParameter, local_tensor

_MISSING, _PRESENT, _NONFINITE = 0, 1, 2


def local_gradients(binding: Binding, *, error_if_nonfinite: bool) -> dict[Tensor, Tensor]:
    """Local gradient of every parameter that has one on any rank of its mesh; zeros where only this rank has none.

    Collective over every mesh of the parameters (one small all-reduce each); every rank of it must call it. The host
    waits for its result only if a gradient is missing here or must be checked.

    Raises:
        NonFiniteGradientError: On all ranks of the mesh, with the names of the parameters, if the norm of a gradient is
            NaN or Inf anywhere and ``error_if_nonfinite`` is set.
    """
    found: dict[Tensor, Tensor] = {}
    pending = [
        (members, *_start_agreement(axes, members, found, check=error_if_nonfinite)) for axes, members in binding.meshes
    ]
    nonfinite: list[str] = []
    for members, flags, work in pending:
        if work is not None:
            work.wait()
        trainable = [member for member in members if member.tensor.requires_grad]
        if not error_if_nonfinite and all(member.tensor in found for member in trainable):
            continue
        for member, flag in zip(members, flags.tolist(), strict=True):
            if flag == _NONFINITE:
                nonfinite.append(member.route.name)
            if flag != _MISSING and member.tensor not in found:
                found[member.tensor] = torch.zeros_like(local_tensor(member.tensor))
    if nonfinite:
        raise NonFiniteGradientError(_message(nonfinite))
    return found


def _start_agreement(
    axes: AxisGroup, members: Sequence[BoundParameter], found: dict[Tensor, Tensor], *, check: bool
) -> tuple[Tensor, dist.Work | None]:
    """Collect the local gradients into ``found`` and begin the all-reduce of one flag per parameter."""
    have = [member for member in members if member.tensor.requires_grad and member.tensor.grad is not None]
    for member in have:
        found[member.tensor] = _local_gradient(member)
    device = local_tensor(members[0].tensor).device
    flags = torch.tensor([_PRESENT if member.tensor in found else _MISSING for member in members], device=device)
    if check:
        filled = [
            index for index, member in enumerate(members) if member.tensor in found and found[member.tensor].numel()
        ]
        if filled:
            # The 2-norm, since the infinity norm and isfinite are 15 to 20 times slower on a CPU.
            norms = torch._foreach_norm([found[members[index].tensor] for index in filled])
            is_finite = torch.stack([norm.float() for norm in norms]).isfinite()
            flags[filled] = torch.where(is_finite, _PRESENT, _NONFINITE)
    work = None
    if axes.group is not None:
        work = start_all_reduce_max(flags, axes)
    return flags, work


def _local_gradient(member: BoundParameter) -> Tensor:
    grad = member.tensor.grad
    assert grad is not None
    if grad.is_sparse or grad.is_complex():
        raise TypeError(f"{member.route.name} has a sparse or complex gradient; ParallelMuon takes dense real ones")
    return local_tensor(grad).to(member.tensor.dtype)


def _message(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (
        f"NaN or Inf in the norm of the gradient of {', '.join(names[:5])}{more}. The step was not taken: weights and "
        "optimizer state are unchanged on all ranks. Lower the learning rate, clip gradients, or look for a bad batch; "
        "error_if_nonfinite=False turns the check off."
    )
