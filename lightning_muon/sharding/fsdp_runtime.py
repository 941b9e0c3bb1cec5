"""The FSDP2 units of a sharded model, and switches of them that no framework sets."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_muon.compat.torch import init_fsdp_root, shards_over_one_rank


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the FSDP2 units of ``module``, the root first."""
    return (child for child in module.modules() if isinstance(child, FSDPModule))


def fsdp_roots(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the outermost FSDP2 units of ``module``."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from fsdp_roots(child)


def own_places(unit: FSDPModule) -> list[tuple[nn.Module, str]]:
    """One (module, attribute) for each sharded parameter of a unit, without those of units inside it."""
    places: dict[DTensor, tuple[nn.Module, str]] = {}

    def visit(module: nn.Module) -> None:
        for attribute, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                places.setdefault(parameter, (module, attribute))
        for child in module.children():
            if not isinstance(child, FSDPModule):
                visit(child)

    visit(unit)  # type: ignore[arg-type]
    return list(places.values())


def initialize_roots(module: nn.Module) -> None:
    """Make the outermost FSDP2 modules the roots now, once their weights are materialized; local.

    FSDP2 makes the first module that runs forward a root. A block that is called before its root (``generate`` of an
    inner model, a sanity check) would become one, and the real root's first forward would fail. Units in which every
    parameter is frozen get their dtypes here as well, so that they can be unfrozen later under mixed precision.
    """
    for root in fsdp_roots(module):
        frozen: list[nn.Parameter] = []
        for unit in fsdp_modules(root):  # type: ignore[arg-type]
            own = [getattr(owner, attribute) for owner, attribute in own_places(unit)]
            dtypes = {parameter.dtype for parameter in own}
            if not any(p.requires_grad for p in own) and len(dtypes) == 1 and next(iter(dtypes)).is_floating_point:
                frozen += own
        for parameter in frozen:
            parameter.requires_grad_(True)
        init_fsdp_root(root)
        for parameter in frozen:
            parameter.requires_grad_(False)


def set_gradient_sync(module: nn.Module, enabled: bool) -> None:
    """Choose whether the next backward pass reduces gradients over the mesh.

    Without reduction each rank keeps whole gradients of its own, which the next reducing pass adds up; so all but the
    last of several micro-batches may go without. Set it before the forward pass, equally on all ranks; local.
    """
    for unit in fsdp_modules(module):
        unit.set_requires_gradient_sync(enabled, recurse=False)
        # Otherwise the end of each micro-batch would wait for reductions and forget the prefetch order.
        unit.set_is_last_backward(enabled)


def set_gradient_divisor(module: nn.Module, divisor: float | None) -> None:
    """Let the reducing backward passes compute (sum of the gradients over all ranks of the mesh) / ``divisor``.

    ``None`` restores the mean over these ranks. Set it before the backward pass that reduces, equally on all ranks;
    local and cheap. The sum is divided after the communication, in the dtype of the reduction, and only additions
    travel, which every backend has.
    """
    if divisor is not None and not 0 < divisor < float("inf"):
        raise ValueError(f"the divisor of the gradients must be positive and finite, got {divisor}")
    for unit in fsdp_modules(module):
        unit.set_force_sum_reduction_for_comms(divisor is not None)
        factor = divisor
        if shards_over_one_rank(unit):
            # FSDP2 would divide by its factor once before and once after the replicas' sum.
            unit.set_all_reduce_hook(None if divisor is None else lambda reduced: reduced.div_(divisor))  # type: ignore[arg-type]
            factor = None if divisor is None else 1.0
        unit.set_gradient_divide_factor(factor)  # type: ignore[arg-type]


def free_unsharded(module: nn.Module) -> None:
    """Free whole weights that are left from a forward pass without backward, and register the shards again; local.

    After evaluation the root is such a unit: FSDP2 keeps its weights for a backward pass that never comes.
    """
    for unit in fsdp_modules(module):
        unit.reshard()
