"""The Muon part of a step: momentum, gather, Newton-Schulz on the owner, scatter, update; two chunks in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_muon.comm.exchange import BufferPool
from lightning_muon.math.lr_scale import lr_scale
from lightning_muon.math.newton_schulz import orthogonalize
from lightning_muon.optim.binding import ExchangeGroup, MatrixJob, local_tensor
from lightning_muon.optim.transfer import Transfer, make_transfer

States = dict[Tensor, dict[str, Any]]


class MatrixStep:
    """Runs the plans of all exchange groups, always in the same order on every rank."""

    def __init__(
        self,
        groups: Sequence[ExchangeGroup],
        *,
        wire_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._groups = groups
        self._compute_dtype = compute_dtype
        self._pools = [BufferPool(wire_dtype, device) for _ in groups]

    def run(self, gradients: dict[Tensor, Tensor], states: States, *, meanwhile: Callable[[], None]) -> None:
        """Update every matrix that has a gradient; ``meanwhile`` is called once, with the first chunks on the way.

        Collective over the axes of each exchange group; every rank of it must call it, with the same set of
        parameters in ``gradients``.
        """
        waiting = self._transfers(gradients)

        def begin() -> Transfer | None:
            transfer = next(waiting, None)
            if transfer is not None:
                self._start_gather(transfer, gradients, states)
            return transfer

        previous, current, following = None, begin(), begin()
        meanwhile()
        while current is not None:
            current.start_scatter(self._orthogonalize(current))
            if previous is not None:
                _apply_(previous)
            previous, current = current, following
            following = begin()
        if previous is not None:
            _apply_(previous)

    def _transfers(self, gradients: dict[Tensor, Tensor]) -> Iterator[Transfer]:
        """The chunks with anything to do; made when their turn comes, so that few are in memory."""
        slot = 0
        for group, pool in zip(self._groups, self._pools, strict=True):
            for is_resident, chunks in ((True, group.plan.resident), (False, group.plan.chunks)):
                for chunk in chunks:
                    active = [index for index in chunk if group.jobs[index].parameter.tensor in gradients]
                    if active:
                        yield make_transfer(group, active, pool, slot, is_resident=is_resident)
                        slot = 1 - slot

    def _start_gather(self, transfer: Transfer, gradients: dict[Tensor, Tensor], states: States) -> None:
        """Update the momentum of a chunk's local pieces and send what is to be orthogonalized to the owners."""
        rank = transfer.axes.rank
        ahead: dict[MatrixJob, Tensor] = {}
        for (momentum, nesterov), jobs in _group_by(transfer.jobs, "momentum", "nesterov"):
            grads = [job.local_view(gradients[job.parameter.tensor], rank) for job in jobs]
            buffers = [
                job.local_view(local_tensor(states[job.parameter.tensor]["momentum_buffer"]), rank) for job in jobs
            ]
            torch._foreach_lerp_(buffers, grads, 1 - momentum)
            pieces = torch._foreach_lerp(grads, buffers, momentum) if nesterov else buffers
            ahead.update(zip(jobs, pieces, strict=True))
        transfer.start_gather([ahead[job] for job in transfer.jobs])

    def _orthogonalize(self, transfer: Transfer) -> list[Tensor]:
        return [
            orthogonalize(
                whole.reshape(job.matrix.rows, job.matrix.cols),
                coefficients=job.parameter.group["ns_coefficients"],
                num_steps=job.parameter.group["ns_steps"],
                eps=job.parameter.group["eps"],
                compute_dtype=self._compute_dtype,
            ).reshape(whole.shape)
            for job, whole in zip(transfer.owned, transfer.matrices(), strict=True)
        ]


def _apply_(transfer: Transfer) -> None:
    """Wait for the updates of a chunk, then decay and update the local pieces of its parameters."""
    update_of = dict(zip(transfer.jobs, transfer.updates(), strict=True))
    for (lr, weight_decay, adjust_lr_fn), jobs in _group_by(transfer.jobs, "lr", "weight_decay", "adjust_lr_fn"):
        views = {job: job.local_view(local_tensor(job.parameter.tensor), transfer.axes.rank) for job in jobs}
        for view in views.values():
            # Not torch._foreach_mul_: for bfloat16 on a CPU it rounds the factor to bfloat16, 0.998 to 0.9961.
            view.mul_(1 - lr * weight_decay)
        by_scale: dict[float, list[MatrixJob]] = {}
        for job in jobs:
            by_scale.setdefault(lr_scale(job.matrix.rows, job.matrix.cols, adjust_lr_fn), []).append(job)
        for scale, members in by_scale.items():
            torch._foreach_add_(
                [views[job] for job in members], [update_of[job] for job in members], alpha=-(lr * scale)
            )


def _group_by(jobs: Sequence[MatrixJob], *keys: str) -> Iterable[tuple[tuple[Any, ...], list[MatrixJob]]]:
    """Jobs by the values that their param groups have for ``keys``."""
    found: dict[tuple[Any, ...], list[MatrixJob]] = {}
    for job in jobs:
        values = tuple(
            float(value) if isinstance(value, Tensor) else value for value in map(job.parameter.group.get, keys)
        )
        found.setdefault(values, []).append(job)
    return found.items()
