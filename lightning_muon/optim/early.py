"""Gathers that start while backward still runs, and the proof that what they sent is still the gradient.

FSDP2 calls the post-accumulate-grad hooks of a sharded parameter after its reduce-scatter. When all gradients of a
chunk are there, and the chunks before it are on their way, the chunk is sent on a bet: that nobody changes these
gradients before the step. At the step all ranks compare notes (:mod:`lightning_muon.optim.gradients`): a chunk that any
rank has sent is sent by all, so that communications match, and its result counts only if no rank has seen a change. So
gradient clipping, scalers, further backward passes and parameters that only some ranks use are exact; they cost the
head start.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from lightning_muon.compat.torch import call_after_backward
from lightning_muon.optim.binding import local_tensor
from lightning_muon.optim.matrix_step import Chunk, Gradients, MatrixStep, States

_log = logging.getLogger(__name__)
# So many steps in a row a chunk may be sent in vain before it waits for the step.
_MAX_FAILURES = 2


class _Source:
    """A tensor that went into what was sent, and its version."""

    def __init__(self, tensor: Tensor) -> None:
        # Weak: a gradient that the user has dropped must not live on here. Not its id, which a new one may get.
        self._ref = TensorWeakRef(tensor)
        self.renew()

    def renew(self) -> None:
        """Take the version of now."""
        tensor = self._ref()
        self._version = None if tensor is None else _version(tensor)

    def is_unchanged(self, tensor: Tensor | None) -> bool:
        return tensor is not None and self._ref() is tensor and self._version == _version(tensor)


@dataclass(frozen=True, eq=False)
class _Sent:
    """What a chunk was made from; any difference at the step makes it void."""

    gradients: list[_Source]
    buffers: list[_Source]
    options: list[tuple[object, ...]]
    norms: list[Tensor]


@dataclass
class _Progress:
    """Of one chunk: the gradients that are still to come, and how often it was sent in vain."""

    missing: set[Tensor]
    sent: _Sent | None = None
    is_void: bool = False
    failures: int = 0

    @property
    def is_worth_trying(self) -> bool:
        return self.failures < _MAX_FAILURES


@dataclass
class _Arrivals:
    """How often the hook of a parameter is called in a step: more than once with accumulation in several passes."""

    expected: int = 1
    seen: int = 0


class EarlyGathers:
    """Watches the gradients of one plan and starts the gathers of its chunks.

    Local to construct; each chunk that is sent is a communication over the private group of its exchange group.

    Args:
        step: Runs the ops.
        states: Of the optimizer.
        compare_norms: Compare also the norms of the gradients, which finds changes behind autograd's back
            (``grad.data``).
    """

    def __init__(self, step: MatrixStep, states: States, *, compare_norms: bool) -> None:
        self._step, self._states, self._compare_norms = step, states, compare_norms
        self._chunks = {chunk.key: chunk for chunk in step.gathered_chunks}
        self._progress = {key: _Progress(set(chunk.tensors)) for key, chunk in self._chunks.items()}
        self._arrivals: dict[Tensor, _Arrivals] = {}
        self._handles: list[RemovableHandle] = []
        self._keys_of: dict[Tensor, list[str]] = {}
        self._renewal_is_due = False
        for key, chunk in self._chunks.items():
            for tensor in chunk.tensors:
                self._keys_of.setdefault(tensor, []).append(key)
        this = weakref.ref(self)
        for tensor in self._keys_of:
            self._arrivals[tensor] = _Arrivals()
            self._handles.append(tensor.register_post_accumulate_grad_hook(_hook(this)))

    def keys(self, tensors: Collection[Tensor]) -> list[str]:
        """The chunks of these parameters, in their order."""
        return [key for key, chunk in self._chunks.items() if chunk.tensors[0] in tensors]

    def is_sent(self, key: str) -> bool:
        """Whether this rank has sent the chunk since the last step."""
        return self._progress[key].sent is not None

    def keys_of(self, tensors: Collection[Tensor]) -> list[str]:
        """The chunks that hold any of these parameters."""
        return [key for tensor in tensors for key in self._keys_of.get(tensor, ())]

    def is_changed(self, key: str, norms: Mapping[Tensor, Tensor]) -> bool:
        """Whether this rank has sent the chunk and sees that it is void.

        Args:
            key: The chunk.
            norms: Norms of the gradients now, if they are known; they tell of changes behind autograd's back.
        """
        sent = self._progress[key].sent
        if sent is None:
            return False
        tensors = self._chunks[key].tensors
        is_same = (
            not self._progress[key].is_void
            and sent.options == _options(self._chunks[key])
            and all(map(_Source.is_unchanged, sent.gradients, (tensor.grad for tensor in tensors)))
            and all(map(_Source.is_unchanged, sent.buffers, map(self._buffer, tensors)))
            and all(bool(norms[t] == norm) for t, norm in zip(tensors, sent.norms, strict=False) if t in norms)
        )
        return not is_same

    def settle(self, sent: Sequence[str], valid: Collection[str], gradients: Gradients) -> None:
        """Send what other ranks have sent, wait for what is void, and get ready for the next backward pass.

        Collective over the private groups of the exchange groups; every rank must call it, with equal ``sent`` and
        ``valid``.

        Args:
            sent: Chunks that any rank has sent.
            valid: Those of them that count.
            gradients: Local gradients; parameters without one send zeros.
        """
        for key in sent:
            if not self.is_sent(key):
                tensors = self._chunks[key].tensors
                filled = {t: gradients[t] if t in gradients else torch.zeros_like(local_tensor(t)) for t in tensors}
                self._step.start_early(key, filled, self._states)
        for key in sent:
            progress = self._progress[key]
            progress.failures = 0 if key in valid else progress.failures + 1
            if key not in valid:
                self._step.drop_early(key)
                if not progress.is_worth_trying:
                    _log.info(
                        "Gradients of %s, ... change between backward and the step (by clipping, for example): their "
                        "gather no longer starts during backward. overlap='step' says so from the start.",
                        self._chunks[key].group.jobs[self._chunks[key].taken[0]].matrix.name,
                    )
        for key, progress in self._progress.items():
            progress.sent, progress.is_void = None, False
            progress.missing = set(self._chunks[key].tensors)
        for arrivals in self._arrivals.values():
            arrivals.expected, arrivals.seen = max(1, arrivals.seen), 0

    def close(self) -> None:
        """Remove the hooks; local."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def arrived(self, tensor: Tensor) -> None:
        """A gradient has been accumulated; send the chunks that are complete now, in their order."""
        arrivals = self._arrivals[tensor]
        arrivals.seen += 1
        if arrivals.seen > arrivals.expected:
            for key in self._keys_of[tensor]:
                self._progress[key].is_void = True
        if arrivals.seen != arrivals.expected:
            return
        completed = False
        for key in self._keys_of[tensor]:
            missing = self._progress[key].missing
            missing.discard(tensor)
            completed |= not missing
        if completed:
            self._send_complete()

    def _send_complete(self) -> None:
        """Send what is complete; within an exchange group a chunk waits for those before it."""
        number: str | None = None
        blocked = False
        for key, progress in self._progress.items():
            group_number = key.partition(".")[0]
            if group_number != number:
                number, blocked = group_number, False
            if blocked or progress.sent is not None or not progress.is_worth_trying:
                continue
            if progress.missing or not self._can_send(self._chunks[key]):
                blocked = True
            else:
                self._send(key, progress)

    @staticmethod
    def _can_send(chunk: Chunk) -> bool:
        return all(
            isinstance(tensor, DTensor)
            and isinstance(tensor.grad, DTensor)
            and tensor.grad.placements == tensor.placements
            and not tensor.grad.is_complex()
            for tensor in chunk.tensors
        )

    def _send(self, key: str, progress: _Progress) -> None:
        chunk = self._chunks[key]
        gradients = {tensor: local_gradient(tensor) for tensor in chunk.tensors}
        norms = gradient_norms(list(gradients.values())) if self._compare_norms else []
        progress.sent = _Sent(
            [_Source(tensor.grad) for tensor in chunk.tensors],
            [_Source(self._states[tensor]["momentum_buffer"]) for tensor in chunk.tensors],
            _options(chunk),
            norms,
        )
        self._step.start_early(key, gradients, self._states)
        if not self._renewal_is_due:
            self._renewal_is_due = True
            call_after_backward(self._renew)

    def _renew(self) -> None:
        """Take the versions at the end of backward.

        FSDP2 reduces the gradients of a unit into views of one buffer, which share one version: it still counts up when
        later gradients of the unit are added. What changes a gradient in earnest calls its hook again.
        """
        self._renewal_is_due = False
        for progress in self._progress.values():
            for source in progress.sent.gradients if progress.sent is not None else ():
                source.renew()

    def _buffer(self, tensor: Tensor) -> Tensor | None:
        return self._states[tensor].get("momentum_buffer")


def _options(chunk: Chunk) -> list[tuple[object, ...]]:
    groups = [chunk.group.jobs[index].parameter.group for index in chunk.taken]
    return [(float(group["momentum"]), group["nesterov"]) for group in groups]


def _version(tensor: Tensor) -> tuple[int, int]:
    """Changes with every in-place operation."""
    return tensor._version, local_tensor(tensor)._version


def _hook(this: weakref.ref[EarlyGathers]) -> Callable[[Tensor], None]:
    def arrived(tensor: Tensor) -> None:
        gathers = this()
        if gathers is not None:
            gathers.arrived(tensor)

    return arrived


def gradient_norms(gradients: Sequence[Tensor]) -> list[Tensor]:
    """2-norm of each gradient: equal gradients on a CPU have equal norms, bit for bit."""
    return list(torch._foreach_norm(list(gradients))) if gradients else []


def local_gradient(tensor: Tensor) -> Tensor:
    """The calling rank's part of the gradient, in the dtype of the parameter."""
    grad = tensor.grad
    assert grad is not None
    return local_tensor(grad).to(tensor.dtype)
