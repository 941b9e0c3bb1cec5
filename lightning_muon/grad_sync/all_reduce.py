"""Gradients summed on every rank: replicas only."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.exchange import start_all_reduce_sum
from lightning_muon.comm.mesh import AxisGroup, PrivateGroups
from lightning_muon.comm.reduce import flat_gradient
from lightning_muon.grad_sync.results import Results


class AllReduce:
    """One all-reduce for each bucket; afterwards ``p.grad`` is a view of its buffer on every rank.

    Collective over ``group`` to construct; every rank must do so.

    Args:
        group: All data-parallel ranks.
    """

    def __init__(self, group: AxisGroup) -> None:
        (self._group,) = PrivateGroups().of([group])
        self._results = Results()

    def start(self, gradients: Mapping[Tensor, Tensor | None]) -> _Sum:
        """As in :class:`~lightning_muon.grad_sync.transport.Transport`.

        Collective over the private group; every rank must call it.
        """
        buffer = torch.cat([flat_gradient(p, gradient) for p, gradient in gradients.items()])
        work = None if self._group.group is None else start_all_reduce_sum(buffer, self._group)
        return _Sum(self._results, tuple(gradients), buffer, work)

    def resends(self, parameter: Tensor) -> bool:
        """As in ``Transport``: backward adds in place to the sum that ``zero_grad`` has not dropped."""
        return self._results.holds(parameter)

    def is_untouched(self, parameter: Tensor) -> bool:
        """As in ``Transport``."""
        return self._results.is_untouched(parameter)

    def forget(self, parameters: Collection[Tensor]) -> None:
        """Nothing to drop: ``zero_grad`` does it."""


class _Sum:
    """A buffer that is being summed."""

    def __init__(
        self,
        results: Results,
        parameters: tuple[Tensor, ...],
        buffer: Tensor,
        work: dist.Work | None,
    ) -> None:
        self._results, self._parameters, self._buffer, self._work = results, parameters, buffer, work

    def advance(self, *, wait: bool = False) -> bool:
        """Nothing follows the all-reduce."""
        return True

    def finish(self, divisor: float, present: Collection[Tensor]) -> None:
        """Set ``p.grad`` of the parameters in ``present``, or add to what an earlier launch has set."""
        if self._work is not None:
            self._work.wait()
        if divisor != 1:
            self._buffer.div_(divisor)
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            if parameter in present:
                reduced = part.view(parameter.shape)
                parameter.grad = reduced if parameter.grad is None else parameter.grad.add_(reduced)
                self._results.keep(parameter)
