"""Gradients that only some ranks have: agreed on, never a hang; and gradients of parameters that FSDP2 leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from lightning_muon.comm.mesh import axis_group
from lightning_muon.sharding.broadcast import mesh_device
from lightning_muon.sharding.runtime import fsdp_modules, initialize_roots, own_places


class GradientAgreement:
    """Makes gradients after the last backward pass of a step equal in meaning on all ranks.

    FSDP2 reduces the gradients of a unit together. A parameter that one rank uses and another does not makes their
    messages differ in size, and the ranks hang. So units fill in zeros, and this class remembers which parameters
    really were used: a gradient that no rank has computed is removed again, because a zero gradient would still decay
    the weight. A unit whose forward runs on some ranks only is beyond help: its all-gather has no partner.

    Collective over ``mesh``; every rank must construct it, with weights materialized (each unit is gathered once).

    Example::

        shard_model(model, mesh)
        agreement = GradientAgreement(model, mesh)
        model(batch).sum().backward()
        agreement.finish()
        optimizer.step()
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._module = module
        self._everyone = axis_group(mesh, tuple(range(mesh.ndim)))
        self._device = mesh_device(mesh)
        self._places: list[tuple[nn.Module, str]] = []
        self._used: list[bool] = []
        self._agreed: dict[int, TensorWeakRef] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        if self._everyone.group is not None and hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            initialize_roots(module)
            for unit in fsdp_modules(module):
                self._watch(unit)

    def finish(self) -> None:
        """Average the gradients of 0-d parameters, and remove gradients that no rank has computed.

        Collective over the mesh; every rank must call it, after the last backward pass of a step, before clipping.
        """
        average_scalar_gradients(self._module, self._everyone.group, self._device)
        if not self._places:
            return
        used = torch.tensor(self._used, dtype=torch.int32, device=self._device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._everyone.group)
        agreed: dict[int, TensorWeakRef] = {}
        for index, was_used in enumerate(used.tolist()):
            owner, attribute = self._places[index]
            parameter = getattr(owner, attribute)
            if parameter.grad is None:
                continue
            # Gradients may be accumulated over several calls: one that was kept before is kept until it is replaced.
            earlier = self._agreed.get(index)
            if was_used or (earlier is not None and earlier() is parameter.grad):
                agreed[index] = TensorWeakRef(parameter.grad)
            else:
                parameter.grad = None
        self._agreed = agreed
        self._used = [False] * len(self._used)

    def close(self) -> None:
        """Remove the hooks; local."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._places.clear()

    def _watch(self, unit: FSDPModule) -> None:
        """Hook the whole weights of a unit, which exist from the first all-gather on and are reused from then on."""
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        places = own_places(unit)
        frozen = [not getattr(owner, attribute).requires_grad for owner, attribute in places]
        unit.unshard()
        for (owner, attribute), is_frozen in zip(places, frozen, strict=True):
            whole = getattr(owner, attribute)
            if not whole.is_floating_point():
                continue
            # Frozen weights are watched too, because they may be unfrozen later.
            whole.requires_grad_(True)
            self._hooks.append(whole.register_post_accumulate_grad_hook(self._marker(len(self._places))))
            whole.requires_grad_(not is_frozen)
            self._places.append((owner, attribute))
            self._used.append(False)
        unit.reshard()

    def _marker(self, index: int) -> Callable[[Tensor], None]:
        def mark(_: Tensor) -> None:
            self._used[index] = True

        return mark


def average_scalar_gradients(module: nn.Module, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Replace the gradients of 0-d parameters, which FSDP2 leaves out, by their mean over the ranks.

    Collective over ``group`` (``None``: this process is alone); every rank must call it. A missing gradient counts as
    zero unless it is missing everywhere. Calling it again changes nothing.
    """
    scalars = [p for p in module.parameters() if p.ndim == 0 and p.requires_grad and not isinstance(p, DTensor)]
    if not scalars or group is None:
        return
    dtype = torch.float64 if _has_double(scalars) else torch.float32
    packed = torch.zeros(2, len(scalars), dtype=dtype)
    for column, parameter in enumerate(scalars):
        if parameter.grad is not None:
            packed[0, column] = parameter.grad
            packed[1, column] = 1.0
    packed = packed.to(device)
    dist.all_reduce(packed, group=group)
    totals, present = (packed / torch.tensor([[dist.get_world_size(group)], [1]], device=device)).cpu().unbind()
    for index, parameter in enumerate(scalars):
        if present[index] > 0:
            parameter.grad = totals[index].to(parameter)


def _has_double(parameters: Sequence[nn.Parameter]) -> bool:
    return any(parameter.dtype == torch.float64 for parameter in parameters)
