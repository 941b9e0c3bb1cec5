"""The one message of an optimizer step that the host waits for: what all ranks must know before they go on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.groups import AxisGroup
from lightning_muon.compat.torch import let_gloo_finish_at_exit


class Rider(Protocol):
    """Numbers that travel with a message which others send."""

    def numbers(self) -> Sequence[int]:
        """int32 numbers of this rank, equally many on all ranks."""
        ...

    def settle(self, maxima: Sequence[int]) -> Collection[Tensor]:
        """Take the maximum of each number over the ranks; returns the parameters that no rank has a gradient for.

        Collective over the ranks of the message; every rank must call it.
        """
        ...


class StepAgreement:
    """One all-reduce of small integers in host memory, sent by whoever must know first what the ranks have."""

    def __init__(self, host: AxisGroup) -> None:
        self._host = host
        self._ranks = _ranks(host)
        self._rider: Rider | None = None
        self._asked: list[Callable[[], bool]] = []
        self.is_stale = False

    def is_over(self, host: AxisGroup) -> bool:
        """Whether these are the ranks that it is for; local."""
        return _ranks(host) == self._ranks

    @property
    def is_due(self) -> bool:
        """Whether something waits for the next message; the same on all ranks."""
        return self._rider is not None

    def post(self, rider: Rider) -> None:
        """Let ``rider`` travel with the next message; local, alike on all ranks."""
        self._rider = rider

    def join(self, is_stale: Callable[[], bool]) -> None:
        """Ask in every message of a reducer whether a plan is out of date on any rank; local, alike on all ranks."""
        self._asked.append(is_stale)

    def ask(self, numbers: Sequence[int]) -> list[int]:
        """As :meth:`reduce`, and find out :attr:`is_stale`: for a message before the one of the optimizer."""
        *maxima, is_stale = self.reduce([*numbers, any(is_stale() for is_stale in self._asked)])[0]
        self.is_stale = bool(is_stale)
        return maxima

    def reduce(self, numbers: Sequence[int]) -> tuple[list[int], set[Tensor]]:
        """The maximum over the ranks of each of ``numbers``, and what the rider returns.

        Collective over the ranks; every rank must call it with equally many int32 numbers. The host waits.
        """
        rider, self._rider = self._rider, None
        maxima = maxima_over(self._host, [*numbers, *(rider.numbers() if rider else ())])
        own, others = maxima[: len(numbers)], maxima[len(numbers) :]
        return own, set(rider.settle(others)) if rider else set()


def maxima_over(host: AxisGroup, numbers: Sequence[int]) -> list[int]:
    """The maximum over the ranks of each int32 number. Collective over ``host``; every rank must call it."""
    if host.group is None or not numbers:
        return [int(number) for number in numbers]
    let_gloo_finish_at_exit()
    message = torch.tensor(numbers, dtype=torch.int32, device="cpu")
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=host.group)
    return message.tolist()


def _ranks(host: AxisGroup) -> tuple[int, ...]:
    return () if host.group is None else tuple(sorted(dist.get_process_group_ranks(host.group)))
