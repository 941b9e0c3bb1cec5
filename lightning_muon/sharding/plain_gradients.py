"""Gradients of the parameters that FSDP2 leaves out, such as scalars: averaged over the ranks at the end of a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from lightning_muon.comm.groups import AxisGroup


class PlainGradients:
    """Averages the gradients of the plain parameters of a sharded ``module`` over the ranks ``everyone``."""

    def __init__(self, module: nn.Module, everyone: AxisGroup, device: torch.device) -> None:
        self._parameters = [p for p in module.parameters() if not isinstance(p, DTensor) and p.numel() > 0]
        self._everyone, self._device = everyone, device
        # Parameter -> its gradient, and a copy of its values. (Module.to fails on gradients with a weak reference.)
        self._sums: dict[nn.Parameter, tuple[TensorWeakRef, Tensor]] = {}

    def multiply(self, modules: Iterable[nn.Module], scale: Tensor) -> None:
        """Multiply the gradients of the parameters in ``modules`` by ``scale``; local."""
        inside = {parameter for module in modules for parameter in module.parameters()}
        for parameter in self._parameters:
            if parameter in inside and parameter.grad is not None:
                parameter.grad.mul_(scale)

    def average(self, divisor: float | None) -> None:
        """Replace each gradient by (its sum over the ranks) / ``divisor``, by default their number.

        Collective over the ranks. What an earlier call has reduced is not summed again.
        """
        plain = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not plain or (self._everyone.group is None and divisor is None):
            return
        dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in plain) else torch.float32
        kept, added, present = [], [], []
        for parameter in plain:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            before = self._sums.get(parameter)
            kept.append(before[1] if before and before[0]() is gradient else torch.zeros_like(parameter))
            added.append(gradient - kept[-1])
            present.append(torch.tensor([parameter.grad is not None], device=self._device))
        packed = torch.cat([each.detach().reshape(-1).to(self._device, dtype) for each in (*kept, *added, *present)])
        if self._everyone.group is not None:
            dist.all_reduce(packed, group=self._everyone.group)
        sizes = [parameter.numel() for parameter in plain]
        *sums, counts = packed.split([*sizes, *sizes, len(plain)])
        for index, (parameter, count) in enumerate(zip(plain, counts.tolist(), strict=True)):
            if count > 0:
                mean = sums[index] / self._everyone.size
                mean += sums[index + len(plain)] / (divisor or self._everyone.size)
                parameter.grad = gradient = mean.view(parameter.shape).to(parameter)
                self._sums[parameter] = TensorWeakRef(gradient), gradient.clone()
