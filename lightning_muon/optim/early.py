"""Gathers that start while backward still runs, and the proof that what they sent is what the step would send.

FSDP2 calls the post-accumulate-grad hooks of a sharded parameter after its reduce-scatter. When all gradients of a
chunk are there, and the chunks before it are on their way, the chunk is sent on a bet: that nobody changes gradients,
momentum or hyper-parameters before the step. At the step each rank computes again what it would send now and compares
(:meth:`MatrixStep.differs_from_early`), and all ranks compare notes (:mod:`lightning_muon.optim.gradients`): a chunk
that any rank has sent is sent by all, so that communications match, and its result counts only if no rank has found a
difference. So gradient clipping, scalers, further backward passes and parameters that only some ranks use are exact;
they cost the head start.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.grad_sync.arrivals import Arrivals, watch_gradients
from lightning_muon.optim.matrix_step import Chunk, Gradients, MatrixStep, States
from lightning_muon.params.layout import local_tensor

_log = logging.getLogger(__name__)
# A chunk that was sent in vain twice in a row is left to the step for 4 steps, then 8, and so on up to 64.
_FREE_FAILURES, _LONGEST_PAUSE = 1, 64


@dataclass
class _Progress:
    """Of one chunk.

    Attributes:
        missing: Parameters whose gradients are still to come.
        is_sent: Whether this rank has sent it since the last step.
        failures: How often in a row it was sent in vain.
        resume: Number of the step from which on it may be sent again.
    """

    missing: set[Tensor]
    is_sent: bool = False
    failures: int = 0
    resume: int = 0


class EarlyGathers:
    """Watches the gradients of one plan and starts the gathers of its chunks.

    Local to construct; each chunk that is sent is a communication over the private group of its exchange group.

    Args:
        step: Runs the ops.
        states: Of the optimizer.
    """

    def __init__(self, step: MatrixStep, states: States) -> None:
        self._step, self._states = step, states
        self._chunks = {
            chunk.key: chunk
            for chunk in step.gathered_chunks
            if all(isinstance(tensor, DTensor) for tensor in chunk.tensors)
        }
        self._progress = {key: _Progress(set(chunk.tensors)) for key, chunk in self._chunks.items()}
        self._keys_of: dict[Tensor, list[str]] = {}
        for key, chunk in self._chunks.items():
            for tensor in chunk.tensors:
                self._keys_of.setdefault(tensor, []).append(key)
        self._arrivals = {tensor: Arrivals() for tensor in self._keys_of}
        self._num_steps = 0
        self._remove_hooks = watch_gradients(self, self._keys_of, EarlyGathers.arrived)

    def keys(self, tensors: Collection[Tensor]) -> list[str]:
        """The chunks of these parameters, in their order."""
        return [key for key, chunk in self._chunks.items() if chunk.tensors[0] in tensors]

    def keys_of(self, tensors: Collection[Tensor]) -> list[str]:
        """The chunks that hold any of these parameters."""
        return [key for tensor in tensors for key in self._keys_of.get(tensor, ())]

    def is_sent(self, key: str) -> bool:
        """Whether this rank has sent the chunk since the last step."""
        return self._progress[key].is_sent

    def lacks(self, key: str, gradients: Gradients) -> bool:
        """Whether this rank has sent the chunk, and a gradient of it is gone."""
        return self.is_sent(key) and any(tensor not in gradients for tensor in self._chunks[key].tensors)

    def differs(self, key: str, gradients: Gradients) -> Tensor:
        """Whether the step would send other bits than this rank has sent: a bool on the device.

        Args:
            key: A chunk; one that this rank has not sent does not differ.
            gradients: Local gradients now, all of the chunk.
        """
        if not self.is_sent(key):
            return torch.tensor(False)
        return self._step.differs_from_early(key, gradients, self._states)

    def settle(self, sent: Collection[str], void: Collection[str], gradients: Gradients) -> None:
        """Send what other ranks have sent, wait for what is void, and get ready for the next backward pass.

        Collective over the private groups of the exchange groups; every rank must call it, with equal ``sent`` and
        ``void``.

        Args:
            sent: Chunks that any rank has sent.
            void: Those of them that do not count.
            gradients: Local gradients; parameters without one send zeros.
        """
        for key, progress in self._progress.items():
            if key in sent and not progress.is_sent:
                tensors = self._chunks[key].tensors
                filled = {t: gradients[t] if t in gradients else torch.zeros_like(local_tensor(t)) for t in tensors}
                self._step.start_early(key, filled, self._states)
        self._num_steps += 1
        self.failed(void)
        for key, progress in self._progress.items():
            progress.is_sent = False
            progress.missing = set(self._chunks[key].tensors)
        for arrivals in self._arrivals.values():
            arrivals.begin_step()

    def succeeded(self, valid: Collection[str]) -> None:
        """These chunks were used by the step; the same on all ranks."""
        for key in valid:
            self._progress[key].failures = 0

    def failed(self, void: Collection[str]) -> None:
        """These chunks are of no use, and their buffers are free again; the same on all ranks."""
        for key in self._chunks:
            if key not in void:
                continue
            self._step.drop_early(key)
            progress = self._progress[key]
            progress.failures += 1
            if progress.failures > _FREE_FAILURES:
                pause = min(2**progress.failures, _LONGEST_PAUSE)
                progress.resume = self._num_steps + pause
                _log.info(
                    "Gradients of %s, ... change between backward and the step (by clipping, for example): their "
                    "gather waits for the step in the next %d steps. overlap='step' says so from the start.",
                    self._chunks[key].group.jobs[self._chunks[key].taken[0]].matrix.name,
                    pause,
                )

    def close(self) -> None:
        """Remove the hooks; local."""
        self._remove_hooks()

    @torch.no_grad()
    def arrived(self, tensor: Tensor) -> None:
        """A gradient has been accumulated; send the chunks that are complete now, in their order."""
        if not self._arrivals[tensor].add():
            return
        is_complete = False
        for key in self._keys_of[tensor]:
            missing = self._progress[key].missing
            missing.discard(tensor)
            is_complete |= not missing
        if is_complete:
            self._send_complete()

    def _send_complete(self) -> None:
        """Send what is complete; a chunk waits for all before it, so that the order is the same on all ranks."""
        for key, progress in self._progress.items():
            if progress.is_sent or self._num_steps < progress.resume:
                continue
            if progress.missing or not _can_be_sent(self._chunks[key]):
                return
            progress.is_sent = True
            gradients = {tensor: local_gradient(tensor) for tensor in self._chunks[key].tensors}
            self._step.start_early(key, gradients, self._states)


def _can_be_sent(chunk: Chunk) -> bool:
    """Whether every gradient is whole and of a kind that the step takes."""
    return all(
        isinstance(tensor, DTensor)
        and isinstance(tensor.grad, DTensor)
        and tensor.grad.placements == tensor.placements
        and not tensor.grad.is_complex()
        for tensor in chunk.tensors
    )


def local_gradient(tensor: Tensor) -> Tensor:
    """The calling rank's part of the gradient, in the dtype of the parameter."""
    grad = tensor.grad
    assert grad is not None
    return local_tensor(grad).to(tensor.dtype)
