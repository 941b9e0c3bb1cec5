"""Switches of a sharded model while it trains: when gradients are reduced, when whole weights are freed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_muon.compat.torch import init_fsdp_root


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the FSDP2 units of ``module``, the root first."""
    return (child for child in module.modules() if isinstance(child, FSDPModule))


def set_gradient_sync(module: nn.Module, enabled: bool) -> None:
    """Choose whether the next backward pass reduces gradients over the mesh.

    Without reduction each rank keeps whole gradients of its own, which the next reducing pass adds up; so all but the
    last of several micro-batches may go without. Set it before the forward pass, equally on all ranks; local.
    """
    for unit in fsdp_modules(module):
        unit.set_requires_gradient_sync(enabled, recurse=False)
        # Otherwise the end of each micro-batch would wait for reductions and forget the prefetch order.
        unit.set_is_last_backward(enabled)


def free_unsharded(module: nn.Module) -> None:
    """Free whole weights that are left from a forward pass without backward, and register the shards again; local.

    After evaluation the root is such a unit: FSDP2 keeps its weights for a backward pass that never comes.
    """
    for unit in fsdp_modules(module):
        unit.reshard()


def let_gathers_start(module: nn.Module) -> None:
    """Let the all-gathers of the next forward wait for the weights of now, not for what is queued until then; local.

    Call it on CUDA right after the optimizer step. Whatever changes weights between this call and the next forward must
    do so on a stream that the all-gathers wait for, or their result may miss it. FSDP2 takes one event for all units of
    a root, so the first unit's all-gather waits for the whole step.
    """
    event = torch.cuda.current_stream().record_event()
    for root in _outermost(module):
        root.set_post_optim_event(event)


def initialize_roots(module: nn.Module) -> None:
    """Make the outermost FSDP2 modules the roots now, once their weights are materialized; local.

    FSDP2 makes the first module that runs forward a root. A block that is called before its root (``generate`` of an
    inner model, a sanity check) would become one, and the real root's first forward would fail. Units in which every
    parameter is frozen get their dtypes here as well, so that they can be unfrozen later under mixed precision.
    """
    for root in _outermost(module):
        frozen = _frozen_units(root)
        for parameter in frozen:
            parameter.requires_grad_(True)
        init_fsdp_root(root)
        for parameter in frozen:
            parameter.requires_grad_(False)


def _outermost(module: nn.Module) -> Iterator[FSDPModule]:
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _frozen_units(root: FSDPModule) -> list[nn.Parameter]:
    """Return the parameters of units that train nothing and hold a single floating-point dtype."""
    result: list[nn.Parameter] = []
    for unit in fsdp_modules(root):  # type: ignore[arg-type]
        own = [getattr(owner, attribute) for owner, attribute in own_places(unit)]
        dtypes = {parameter.dtype for parameter in own}
        if not any(p.requires_grad for p in own) and len(dtypes) == 1 and next(iter(dtypes)).is_floating_point:
            result.extend(own)
    return result


def own_places(unit: FSDPModule) -> list[tuple[nn.Module, str]]:
    """Return one (module, attribute) for each sharded parameter of a unit, without those of units inside it."""
    places: list[tuple[nn.Module, str]] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        for attribute, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) and id(parameter) not in seen:
                seen.add(id(parameter))
                places.append((module, attribute))
        for child in module.children():
            if not isinstance(child, FSDPModule):
                visit(child)

    visit(unit)  # type: ignore[arg-type]
    return places
