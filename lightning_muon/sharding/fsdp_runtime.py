"""Switches of a sharded model while it trains: when gradients are reduced, when whole weights are freed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_muon.compat.torch import (
    drop_unreduced_gradients,
    forward_resharding,
    has_unfinished_backward,
    init_fsdp_root,
    is_in_backward,
    reset_fsdp,
    set_forward_resharding,
    shards_over_one_rank,
)


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


class MicroBatches:
    """Chooses what the micro-batches of an accumulated step communicate.

    No micro-batch but the last reduces gradients. With ``reshard_after_backward`` each one gathers the weights anew.
    Without, whole weights stay from the first forward to the last backward: each unit is gathered once per step, and a
    rank holds the whole model. Local; every rank must make the same calls.

    Example::

        micro_batches = MicroBatches(model, reshard_after_backward=False)
        for batch in batches[:-1]:
            with micro_batches.without_sync():
                model(batch).sum().backward()
        model(batches[-1]).sum().backward()
        micro_batches.finish()
    """

    def __init__(self, module: nn.Module, *, reshard_after_backward: bool = True) -> None:
        self._module = module
        self._reshard_after_backward = reshard_after_backward
        self._resharding: list[tuple[FSDPModule, list[Any]]] = []

    @contextmanager
    def without_sync(self) -> Generator[None]:
        """Run one micro-batch that is not the last one of its step, forward and backward."""
        if not self._reshard_after_backward:
            self._keep_whole()
        set_gradient_sync(self._module, False)
        try:
            yield
        finally:
            set_gradient_sync(self._module, True)
            if not self._reshard_after_backward:
                _set_reshard_after_backward(self._module, True)

    def finish(self) -> None:
        """Let forward passes reshard again as before; call it after the last backward pass of each step."""
        for unit, meshes in self._resharding:
            set_forward_resharding(unit, meshes)
        self._resharding.clear()

    def _keep_whole(self) -> None:
        _set_reshard_after_backward(self._module, False)
        if not self._resharding:
            self._resharding = [(unit, forward_resharding(unit)) for unit in fsdp_modules(self._module)]
            for unit, meshes in self._resharding:
                set_forward_resharding(unit, [None] * len(meshes))


def _set_reshard_after_backward(module: nn.Module, enabled: bool) -> None:
    for unit in fsdp_modules(module):
        unit.set_reshard_after_backward(enabled, recurse=False)


def set_gradient_divisor(module: nn.Module, divisor: float | None) -> None:
    """Let the reducing backward passes compute (sum of the gradients over all ranks of the mesh) / ``divisor``.

    ``None`` restores the mean over these ranks. Set it before the backward pass that reduces, equally on all ranks;
    local and cheap. The sum is divided after the communication, in the dtype of the reduction, and only additions
    travel, which every backend has.

    Raises:
        ValueError: If the divisor is not positive and finite.
    """
    if divisor is not None and not 0 < divisor < float("inf"):
        raise ValueError(f"the divisor of the gradients must be positive and finite, got {divisor}")
    for unit in fsdp_modules(module):
        unit.set_force_sum_reduction_for_comms(divisor is not None)
        factor = divisor
        if shards_over_one_rank(unit):
            # FSDP2 would divide by its factor once before and once after the replicas' sum.
            unit.set_all_reduce_hook(None if divisor is None else _divider(divisor))  # type: ignore[arg-type]
            factor = None if divisor is None else 1.0
        unit.set_gradient_divide_factor(factor)  # type: ignore[arg-type]


def _divider(divisor: float) -> Callable[[Tensor], None]:
    def divide(reduced: Tensor) -> None:
        reduced.div_(divisor)

    return divide


def forget_unreduced(module: nn.Module, parameters: Collection[Tensor]) -> None:
    """Drop the gradients of ``parameters`` that no backward pass has reduced yet; local.

    FSDP2 keeps those of micro-batches without reduction at its whole weights, where ``zero_grad`` does not see them.
    """
    for unit in fsdp_modules(module):
        drop_unreduced_gradients(unit, parameters)


def reset_after_failure(module: nn.Module, *, drop_gradients: bool) -> None:
    """Make a model ready for the next forward pass after an exception in one, or in a backward pass; local.

    FSDP2 is left in the middle of the pass: it would take the next forward for a recomputation, and never reduce the
    gradients of some units again.

    Args:
        module: The model.
        drop_gradients: Drop all gradients, also those of micro-batches before, which cannot be told apart from the
            part that the failed backward pass has added.
    """
    for root in fsdp_roots(module):
        reset_fsdp(root)
    if drop_gradients:
        for unit in fsdp_modules(module):
            drop_unreduced_gradients(unit)
        for parameter in module.parameters():
            parameter.grad = None


def is_left_in_backward(units: Iterable[FSDPModule]) -> bool:
    """Whether an exception has ended a backward pass through one of ``units``, and nobody has reset it since; local."""
    return not is_in_backward() and any(map(has_unfinished_backward, units))


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
    for root in fsdp_roots(module):
        root.set_post_optim_event(event)


def initialize_roots(module: nn.Module) -> None:
    """Make the outermost FSDP2 modules the roots now, once their weights are materialized; local.

    FSDP2 makes the first module that runs forward a root. A block that is called before its root (``generate`` of an
    inner model, a sanity check) would become one, and the real root's first forward would fail. Units in which every
    parameter is frozen get their dtypes here as well, so that they can be unfrozen later under mixed precision.
    """
    for root in fsdp_roots(module):
        frozen = _frozen_units(root)
        for parameter in frozen:
            parameter.requires_grad_(True)
        init_fsdp_root(root)
        for parameter in frozen:
            parameter.requires_grad_(False)


def fsdp_roots(module: nn.Module) -> Iterator[FSDPModule]:
    """Yield the outermost FSDP2 units of ``module``."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from fsdp_roots(child)


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
