"""Guards: objects that find mistakes of a program, beside what does the work."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_muon.compat.torch import (
    forget_forward,
    has_unfinished_backward,
    has_unfinished_forward,
    is_in_backward,
    overwritten_weights,
)
from lightning_muon.params.uses import clean_name
from lightning_muon.sharding.base import ShardingMode
from lightning_muon.sharding.units import UnitListener, fsdp_roots, original_class


class Guard(UnitListener):
    """Overrides the events of a training, and of FSDP2 units, that it wants to hear of.

    The engine calls each on all ranks alike, and so each may communicate, unless it is said to be local. What is found
    is raised.
    """

    def backward_begins(self) -> None:
        """Before a backward pass; local."""

    def gradients_are_finished(self) -> None:
        """After the reduction of gradients."""

    def clips(self) -> None:
        """Before gradients are clipped; local."""

    def steps(self) -> None:
        """Before a step of an optimizer; local."""

    def step_has_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step of an optimizer."""

    def evaluation_has_ended(self) -> None:
        """After an evaluation on all ranks."""

    def failed(self, error: BaseException) -> None:
        """After an exception on this rank, which may be the only one; local."""

    def close(self) -> None:
        """At the end of the training on this rank; local."""


class FailedPasses(Guard):
    """Marks a mode as failed when FSDP2 has noticed an exception in a pass that the program has caught."""

    def __init__(self, mode: ShardingMode) -> None:
        self._mode = mode

    @override
    def enters(self, unit: FSDPModule) -> None:
        if has_unfinished_backward(unit) and not is_in_backward():
            self._mode.pass_failed()
        self._mode.require_no_failure()

    @override
    def leaves(self, unit: FSDPModule) -> None:
        if not has_unfinished_forward(unit):
            return
        if is_in_backward():  # Checkpointing stops a unit that it computes again with an exception of its own.
            forget_forward(unit)
        else:
            self._mode.pass_failed()

    @override
    def evaluation_has_ended(self) -> None:
        self._mode.require_no_failure()


class SecondDerivatives(Guard):
    """Refuses ``create_graph=True``: FSDP2 frees the weights before the next backward pass needs them."""

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[nn.Module, str] = {child: name for name, child in module.named_modules()}

    @override
    def enters_backward(self, unit: FSDPModule) -> None:
        if torch.is_grad_enabled():
            assert isinstance(unit, nn.Module)
            raise RuntimeError(
                "a backward pass with create_graph=True (forces, a gradient penalty) reaches "
                f"{self._names.get(unit, '')!r} ({original_class(unit).__name__}), whose weights FSDP2 frees before "
                "the next one needs them; use sharding='zero2' or 'ddp'"
            )


class WrittenWeights(Guard):
    """Finds a program that writes to gathered weights, which FSDP2 frees next, so that the old values would stay.

    In the steps 0, 1, 2, 4, 8, ... only: it reads all weights of this rank, and waits for the device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._roots, self._step = list(fsdp_roots(module)), 0

    @override
    def returns(self, unit: FSDPModule) -> None:
        if self._step & (self._step - 1) or torch.is_inference_mode_enabled():
            return
        if names := overwritten_weights(unit):
            raise RuntimeError(
                f"the program has written to {len(names)} gathered weights ({clean_name(names[0])}, ...), which FSDP2 "
                "throws away, so that the old values would stay. Change weights between steps (in on_train_batch_end "
                "of a Trainer, for example), not in training_step or a forward; or use sharding='zero2' or 'ddp', "
                "where each rank has all weights"
            )

    @override
    def backward_begins(self) -> None:
        for root in self._roots:  # Their weights stay whole from forward to backward.
            self.returns(root)

    @override
    def gradients_are_finished(self) -> None:
        self._step += 1
