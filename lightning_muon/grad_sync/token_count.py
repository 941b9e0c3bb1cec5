"""How many tokens the losses of an accumulated batch were summed over, on all ranks together."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.comm.collectives import start_all_reduce_sum, start_reading
from lightning_muon.comm.groups import AxisGroup, host_group
from lightning_muon.compat.torch import let_gloo_finish_at_exit

_WHAT_TO_DO = "call self.trainer.strategy.report_tokens(n) in training_step"
_EXPECTED = "a whole number of at least 0, or a 0-d tensor of integers or float32"

# What was reported at a time: a number, what gives one, or a text that says what it was instead of a count.
_Report = int | float | Callable[[], int | float] | str


@dataclass
class _Window:
    """What this rank has reported: one list for each micro-batch, and what was wrong beside that."""

    reports: list[list[_Report]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Sum:
    """A sum over the ranks that is under way, and what was wrong on this rank (empty: nothing)."""

    tokens_and_problems: Tensor
    problem: str
    work: dist.Work | None


class TokenCount:
    """Counts the tokens of an accumulated batch (a window of micro-batches) over all ranks.

    The loss of a micro-batch is the sum over its tokens, and the gradient shall be that of the mean over the tokens of
    all micro-batches on all ranks, which may have any number of them.

    Construction is collective over ``group``; every rank of it must construct it.

    Args:
        group: All ranks that have tokens of their own (data and context parallel ones).

    Example::

        count = TokenCount(ALONE)
        for tokens in ([1, 2, 3], [4]):
            count.begin_micro_batch()
            count.report(len(tokens))
        assert count.total() == 4
        assert count.divisor(accumulate=2) == 2  # the sum of losses is divided by 2 already
        count.reset()
    """

    def __init__(self, group: AxisGroup) -> None:
        self._group = host_group(group)
        self._window = _Window()
        self._late: list[str] = []
        self._sum: _Sum | None = None
        self._total: float | None = None

    def begin_micro_batch(self) -> None:
        """Expect a report from here on. Local; every rank must call it before each training step.

        A window that was summed is over: the next micro-batch begins another one.
        """
        if self._sum is not None:
            self.reset()
        self._window.reports.append([])

    def report(self, num_tokens: int | float | Tensor) -> None:
        """Add tokens of this rank to the micro-batch; 0 if it has none. Local; never waits for a device.

        A value that is no count does not raise here, on one rank alone, but in :meth:`total`, on all of them.

        Args:
            num_tokens: Whole number of at least 0, or a 0-d tensor with one, on any device.
        """
        if self._sum is not None:
            self._late.append(f"reported tokens after they were summed; {_WHAT_TO_DO}, not in backward")
        elif not self._window.reports:
            self._window.problems.append(f"reported tokens outside of a training step; {_WHAT_TO_DO}")
        else:
            self._window.reports[-1].append(_report(num_tokens))

    def start(self) -> None:
        """Begin to sum the window over the ranks, without waiting for the others; does nothing the second time.

        Collective over the group; every rank of it must call it, after the last training step of the window. Waits for
        the device where tensors on it were reported.
        """
        if self._sum is not None:
            return
        tokens, problem = _tokens_and_problem(self._window)
        values = torch.tensor([tokens, float(bool(problem))], dtype=torch.float64, device="cpu")
        work = start_all_reduce_sum(values, self._group) if self._group.group is not None else None
        self._sum = _Sum(values, problem, work)

    def total(self) -> float:
        """Tokens of the window on all ranks. Collective over the group; every rank of it must call it.

        Raises:
            ValueError: On all ranks, with the same message, if a rank has not reported in each micro-batch, or has
                reported something that is no count.
        """
        if self._total is None:
            self.start()
            assert self._sum is not None
            if self._sum.work is not None:
                self._sum.work.wait()
            total, num_problems = self._sum.tokens_and_problems.tolist()
            if num_problems:
                raise ValueError(self._first_problem(self._sum.problem))
            self._total = float(total)
        return self._total

    def divisor(self, accumulate: int) -> float:
        """What gradients have to be divided by, after a sum over ranks: ``max(total, 1) / accumulate``.

        Collective over the group, as :meth:`total` is; every rank of it must call it.

        Args:
            accumulate: The number that each loss was divided by before backward (``accumulate_grad_batches``).
        """
        return max(self.total(), 1.0) / accumulate

    def reset(self) -> None:
        """Forget the window, after the step. Local; every rank must call it."""
        self._window = _Window(problems=self._late)
        self._late = []
        self._sum = None
        self._total = None

    def _first_problem(self, problem: str) -> str:
        """The problem of the first rank that has one. Collective over the group; every rank of it must call it."""
        if self._group.group is None:
            return problem
        let_gloo_finish_at_exit()
        problems = [""] * self._group.size
        dist.all_gather_object(problems, problem, group=self._group.group)
        return next(each for each in problems if each)


def _report(num_tokens: Any) -> _Report:
    """What is kept of a report, without waiting for a device.

    A tensor is copied to the host at once, since its owner may change it, and so that reading it waits for the device
    only up to here, and not for the rest of the micro-batch.
    """
    if isinstance(num_tokens, Tensor):
        kind = f"a {type(num_tokens).__name__} {tuple(num_tokens.shape)} of {num_tokens.dtype} as its"
        is_number = num_tokens.ndim == 0 and not isinstance(num_tokens, DTensor) and _counts_exactly(num_tokens.dtype)
        if not is_number:
            return kind
        read = start_reading([num_tokens])
        return lambda: read()[0][0]
    if isinstance(num_tokens, numbers.Real) and not isinstance(num_tokens, bool):
        return int(num_tokens) if isinstance(num_tokens, numbers.Integral) else float(num_tokens)
    return f"{num_tokens!r} as its"


def _counts_exactly(dtype: torch.dtype) -> bool:
    """Neither truth values nor complex numbers, nor those that round counts over 2048 (float16) or 256 (bfloat16)."""
    return dtype != torch.bool and not dtype.is_complex and (not dtype.is_floating_point or dtype.itemsize >= 4)


def _tokens_and_problem(window: _Window) -> tuple[float, str]:
    """Tokens of this rank, and a sentence on the first thing that is wrong, empty if nothing is."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    for problem in window.problems:
        return 0.0, f"rank {rank} {problem}"
    total = 0
    for index, reports in enumerate(window.reports, start=1):
        where = f"in micro-batch {index} of {len(window.reports)}"
        if not reports:
            return 0.0, f"rank {rank} reported no tokens {where}; {_WHAT_TO_DO}, also where n is 0"
        for report in reports:
            value = report() if callable(report) else report
            if isinstance(value, str) or not (math.isfinite(value) and value >= 0 and value == int(value)):
                found = value if isinstance(value, str) else f"{value} as its"
                return 0.0, f"rank {rank} reported {found} number of tokens {where}; {_WHAT_TO_DO}, with {_EXPECTED}"
            total += int(value)
    return float(total), ""
