"""Communication that starts while backward still runs, and the check that it has sent what the step would send.

FSDP2 calls the post-accumulate-grad hooks of a sharded parameter after its reduce-scatter. When all gradients of a
bucket are there, and the buckets before it have been sent, the bucket is sent speculatively: until the step, gradients,
state and hyper-parameters may still change. At the step each rank checks whether it would send the same now, and all
ranks agree (:mod:`lightning_muon.optim.gradients`): a bucket that any rank has sent is sent by all, so that
communications match, and its result counts only if no rank has found a difference. So gradient clipping, scalers,
further backward passes and parameters that only some ranks use are exact; they cost the head start.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.compat.torch import at_end_of_backward
from lightning_muon.grad_sync.reducer import Arrivals, watch_gradients
from lightning_muon.optim.parameters import Gradients
from lightning_muon.params.layout import local_tensor

_log = logging.getLogger(__name__)
# A bucket that was sent in vain twice in a row is left to the step for 4 steps, then 8, and so on up to 64.
_FREE_FAILURES, _LONGEST_PAUSE = 1, 64


@dataclass
class _Progress:
    """How far one bucket is."""

    missing: set[Tensor]  # Parameters whose gradients are still to come.
    is_sent: bool = False  # Whether this rank has sent it since the last step.
    failures: int = 0  # How often in a row it was sent in vain.
    resume: int = 0  # Number of the step from which on it may be sent again.


class BackwardPrefetch(ABC):
    """Sends the buckets of one plan in their order, each as soon as its gradients are there; local to construct."""

    def __init__(self, buckets: Mapping[str, Sequence[Tensor]], names: Mapping[Tensor, str]) -> None:
        self._buckets, self._names = buckets, names
        self._progress = {key: _Progress(set(tensors)) for key, tensors in buckets.items()}
        self._keys_of: dict[Tensor, list[str]] = {}
        for key, tensors in buckets.items():
            for tensor in tensors:
                self._keys_of.setdefault(tensor, []).append(key)
        self._arrivals = Arrivals()
        self._num_steps = 0
        # On CUDA gradients are read on a stream of its own, and whoever writes to them has to come after that.
        self._reads_late = local_tensor(next(iter(self._keys_of))).is_cuda if self._keys_of else False
        self.close = watch_gradients(self, self._keys_of, BackwardPrefetch.arrived)  # Removes the hooks; local.

    @abstractmethod
    def _start(self, key: str, gradients: Gradients) -> None:
        """Send a bucket, whose gradients are all there. Changes nothing that a skipped step must keep."""

    @abstractmethod
    def _drop(self, key: str) -> None:
        """Wait for a bucket whose result is not wanted, and give its buffers back."""

    @abstractmethod
    def _differs(self, key: str, gradients: Gradients) -> Tensor:
        """Whether :meth:`_start` would now send other bits than it has sent; a bool on the device."""

    @abstractmethod
    def _wait_until_read(self, key: str) -> None:
        """Wait until the gradients of a sent bucket have been read; on CUDA only the current stream waits."""

    def _is_ready(self, key: str) -> bool:
        """Whether all that a bucket is made of is there, apart from the gradients."""
        return True

    def keys(self, tensors: Set[Tensor]) -> list[str]:
        """The buckets that hold any of these parameters, in their order."""
        return [key for key, members in self._buckets.items() if not tensors.isdisjoint(members)]

    def is_sent(self, key: str) -> bool:
        """Whether this rank has sent the bucket since the last step."""
        return self._progress[key].is_sent

    def lacks(self, key: str, gradients: Gradients) -> bool:
        """Whether this rank has sent the bucket, and one of its gradients is gone."""
        return self.is_sent(key) and any(tensor not in gradients for tensor in self._buckets[key])

    def differs(self, key: str, gradients: Gradients) -> Tensor:
        """Whether a step with these gradients would send other bits than this rank has sent: a bool on the device."""
        if self.is_sent(key):
            return self._differs(key, gradients)
        return torch.zeros((), dtype=torch.bool, device=local_tensor(self._buckets[key][0]).device)

    def finish_sends(self, sent: Collection[str], void: Collection[str], gradients: Gradients) -> None:
        """Send the buckets that any rank has ``sent``, drop the ``void`` ones, and prepare the next backward pass.

        Collective over the ranks that share buckets; every rank must call it, with equal ``sent`` and ``void``.
        """
        for key, progress in self._progress.items():
            if key in sent and not progress.is_sent:
                self._start(key, filled(self._buckets[key], gradients))
        if self._num_steps > 0:
            # A bucket that no rank could send, because a parameter is not in use, must not hold back those after it.
            self._pause([key for key in self._buckets if key not in sent])
        self._num_steps += 1
        self.failed(void)
        for key, progress in self._progress.items():
            progress.is_sent = False
            progress.missing = set(self._buckets[key])
        self._arrivals.begin_step()

    def succeeded(self, valid: Collection[str]) -> None:
        """Note that the step has used these buckets; the same on all ranks."""
        for key in valid:
            self._progress[key].failures = 0

    def failed(self, void: Collection[str]) -> None:
        """Drop these buckets, which are of no use; the same on all ranks."""
        dropped = [key for key in self._buckets if key in void]
        for key in dropped:
            self._drop(key)
        self._pause(dropped)

    def _pause(self, keys: Sequence[str]) -> None:
        """Leave buckets to the step for a while if they were sent early in vain more than once in a row."""
        for key in keys:
            progress = self._progress[key]
            if self._num_steps < progress.resume:
                continue
            progress.failures += 1
            if progress.failures > _FREE_FAILURES:
                pause = min(2**progress.failures, _LONGEST_PAUSE)
                progress.resume = self._num_steps + pause
                _log.info(
                    "Gradients of %s, ... are missing, or change between backward and the step (by clipping, for "
                    "example): they are sent by the step in the next %d steps. overlap='step' says so from the start.",
                    self._names[self._buckets[key][0]],
                    pause,
                )

    @torch.no_grad()
    def arrived(self, tensor: Tensor) -> None:
        """Send the buckets that this gradient completes, in order: a bucket waits for all before it, on all ranks."""
        if not self._arrivals.add(tensor):
            return
        for key in self._keys_of[tensor]:
            self._progress[key].missing.discard(tensor)
        if all(self._progress[key].missing for key in self._keys_of[tensor]):
            return
        for key, progress in self._progress.items():
            if progress.is_sent or self._num_steps < progress.resume:
                continue
            if progress.missing or not all(map(_can_be_sent, self._buckets[key])) or not self._is_ready(key):
                return
            progress.is_sent = True
            grads = {tensor: tensor.grad for tensor in self._buckets[key] if tensor.grad is not None}
            self._start(key, {tensor: local_tensor(grad).to(tensor.dtype) for tensor, grad in grads.items()})
            if self._reads_late:
                at_end_of_backward(partial(self._wait_until_read, key))


def filled(tensors: Sequence[Tensor], gradients: Gradients) -> Gradients:
    """The local gradients of these parameters, zeros where there is none."""
    return {
        tensor: gradients[tensor] if tensor in gradients else torch.zeros_like(local_tensor(tensor))
        for tensor in tensors
    }


def is_unusable(grad: Tensor | None) -> bool:
    """Whether a gradient is of a kind that no step takes."""
    return grad is not None and (grad.is_complex() or grad.is_sparse)


def is_unreduced(tensor: Tensor, grad: Tensor | None) -> bool:
    """Whether a gradient has other placements than its parameter (a partial sum), so that all ranks must reduce it."""
    return isinstance(grad, DTensor) and isinstance(tensor, DTensor) and grad.placements != tensor.placements


def _can_be_sent(tensor: Tensor) -> bool:
    """Whether the gradient is there, laid out like the parameter, and of a kind that the step takes."""
    grad = tensor.grad
    is_alike = grad is not None and isinstance(grad, DTensor) == isinstance(tensor, DTensor)
    return is_alike and not is_unusable(grad) and not is_unreduced(tensor, grad)
