"""Gradients that FSDP2 leaves to others: of parameters that no rank has used, and of those that it does not shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef
from typing_extensions import override

from lightning_muon.comm.collectives import AxisGroup
from lightning_muon.params.layout import local_tensor
from lightning_muon.sharding.units import UnitListener, fsdp_modules, own_places

# Python's garbage collector does not look into hooks of tensors. They must not refer to the model, or it would never be
# freed, and neither would its process groups.


def _mark(used: list[bool], index: int, _: Tensor) -> None:
    used[index] = True


def _make_room(reference: TensorWeakRef, zeros: dict[int, Tensor], _: Tensor) -> None:
    """Remove the gradient of zeros, which takes no memory, before backward adds a gradient to it."""
    whole = reference()
    if whole is not None and zeros.pop(id(whole), None) is whole.grad:
        whole.grad = None


class UnusedParameters(UnitListener):
    """Lets FSDP2 reduce the gradients of all parameters on all ranks, and removes those that no rank has computed.

    FSDP2 reduces the gradients of a unit together, and hangs if a parameter is used on some ranks only. A gradient of
    zeros for one that no rank has used would decay its weight.

    Args:
        module: Its weights must be materialized; each unit is gathered once. Construction is collective over its mesh.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: list[tuple[nn.Module, str]] = []
        self._used: list[bool] = []  # Whether this rank has a gradient for the parameter at each place.
        self._kept: dict[int, TensorWeakRef] = {}  # Number of a place -> the gradient that was kept for it last.
        self._wholes: dict[FSDPModule, list[Tensor]] = {}  # The whole weights of units that FSDP2 does not fill up.
        self._zeros: dict[int, Tensor] = {}  # Number of whole weights -> a gradient of zeros that takes no memory.
        self._hooks = ExitStack()
        for unit in fsdp_modules(module):
            self._watch(unit)

    def _watch(self, unit: FSDPModule) -> None:
        """Hook the whole weights of a unit, which exist from the first all-gather on and are reused."""
        places = own_places(unit)
        frozen = [not getattr(owner, attribute).requires_grad for owner, attribute in places]
        wholes: list[Tensor] = []
        fills_up = hasattr(unit, "set_reduce_scatter_unused_params")  # From torch 2.13 on.
        unit.unshard()
        for (owner, attribute), is_frozen in zip(places, frozen, strict=True):
            whole = getattr(owner, attribute)
            if not whole.is_floating_point():
                continue
            # Frozen weights are watched too, because they may be unfrozen later.
            whole.requires_grad_(True)
            mark = partial(_mark, self._used, len(self._used))
            self._hooks.enter_context(whole.register_post_accumulate_grad_hook(mark))
            if not fills_up:
                self._hooks.enter_context(whole.register_hook(partial(_make_room, TensorWeakRef(whole), self._zeros)))
            whole.requires_grad_(not is_frozen)
            self._places.append((owner, attribute))
            self._used.append(False)
            wholes.append(whole)
        unit.reshard()
        if fills_up:
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        else:
            self._wholes[unit] = wholes

    @override
    def enters_backward(self, unit: FSDPModule) -> None:
        """Give whole weights without a gradient zeros as gradient, so that FSDP2 reduces them on all ranks; local."""
        for whole in self._wholes.get(unit, ()):
            if whole.requires_grad and whole.grad is None:
                self._zeros[id(whole)] = torch.zeros((), dtype=whole.dtype, device=whole.device).expand(whole.shape)
                whole.grad = self._zeros[id(whole)]

    def used(self) -> list[bool]:
        """Whether this rank has computed a gradient for the parameter at each place; local."""
        # Gradients may be accumulated over several steps: one that was kept before is kept until it is replaced.
        return [is_used or is_kept for is_used, is_kept in zip(self._used, self._are_kept(), strict=True)]

    def has_kept(self) -> bool:
        """Whether there are gradients that were kept before, to which backward adds; local."""
        return any(self._are_kept())

    def _are_kept(self) -> list[bool]:
        return [
            index in self._kept and self._kept[index]() is parameter.grad is not None
            for index, parameter in enumerate(self._parameters())
        ]

    def local_gradients(self) -> list[Tensor]:
        """This rank's parts of all gradients; share memory. Local."""
        return [local_tensor(parameter.grad) for parameter in self._parameters() if parameter.grad is not None]

    def keep(self, used: Sequence[int]) -> None:
        """Remove the gradients of parameters but those that any rank has ``used``; local, alike on all ranks."""
        self._kept.clear()
        for index, (parameter, is_used) in enumerate(zip(self._parameters(), used, strict=True)):
            if not is_used:
                parameter.grad = None
            elif parameter.grad is not None:
                self._kept[index] = TensorWeakRef(parameter.grad)
        self._used[:] = [False] * len(self._used)

    def _parameters(self) -> list[Tensor]:
        return [getattr(owner, attribute) for owner, attribute in self._places]

    def close(self) -> None:
        """Remove the hooks, and all weak references to gradients, with which ``Module.to`` fails; local."""
        self._kept.clear()
        self._hooks.close()


class PlainGradients:
    """Averages the gradients of the plain parameters of a sharded ``module``, such as scalars, over ``everyone``."""

    def __init__(self, module: nn.Module, everyone: AxisGroup, device: torch.device) -> None:
        self._parameters = [p for p in module.parameters() if not isinstance(p, DTensor) and p.numel() > 0]
        self._everyone, self._device = everyone, device
        # Parameter -> its mean, and a copy of its values. (Module.to fails on gradients with a weak reference.)
        self._means: dict[nn.Parameter, tuple[TensorWeakRef, Tensor]] = {}

    def multiply(self, modules: Iterable[nn.Module], scale: Tensor) -> None:
        """Multiply the gradients of the parameters in ``modules`` by ``scale``; local."""
        inside = {parameter for module in modules for parameter in module.parameters()}
        for parameter in self._parameters:
            if parameter in inside and parameter.grad is not None:
                parameter.grad.mul_(scale)

    def average(self, divisor: float | None) -> None:
        """Replace each gradient by (its sum over the ranks) / ``divisor``, by default their number.

        Collective over the ranks. What an earlier call has divided is not divided again.
        """
        plain = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not plain or (self._everyone.group is None and divisor is None):
            return
        divisor = divisor or self._everyone.size
        sent: list[Tensor] = []
        for parameter in plain:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            known = self._means.get(parameter)
            if known is not None and known[0]() is gradient:  # Backward may have added to a mean, equal on all ranks.
                gradient = gradient + known[1] * (divisor / self._everyone.size - 1)
            sent.append(gradient)
        present = torch.tensor([parameter.grad is not None for parameter in plain])
        dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in plain) else torch.float32
        packed = torch.cat([each.detach().reshape(-1).to(self._device, dtype) for each in (*sent, present)])
        if self._everyone.group is not None:
            dist.all_reduce(packed, group=self._everyone.group)
        *sums, counts = packed.split([*(parameter.numel() for parameter in plain), len(plain)])
        for parameter, total, count in zip(plain, sums, counts.tolist(), strict=True):
            if count > 0:
                mean = parameter.grad = (total / divisor).view(parameter.shape).to(parameter)
                self._means[parameter] = TensorWeakRef(mean), mean.clone()
