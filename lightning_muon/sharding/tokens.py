"""How many tokens the losses of an accumulated batch were summed over, on all ranks together."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.collectives import AxisGroup, host_group, start_all_reduce_sum, start_reading

_WHAT_TO_DO = (
    "call self.trainer.strategy.report_tokens(n) in training_step, fabric.strategy.report_tokens(n) or "
    "accelerator.report_tokens(n) before each backward pass"
)
_EXPECTED = "a whole number of at least 0, or a 0-d tensor of integers or float32"

# One report: a number, a function that returns one, or a text that describes a value that is no count.
_Report = int | float | Callable[[], int | float] | str


class TokenCount:
    """Counts the tokens of an accumulated batch (a window of micro-batches) over all ranks of ``group``.

    Construction is collective over ``group``; every rank of it must construct it.
    """

    def __init__(self, group: AxisGroup) -> None:
        self._group = host_group(group)
        self._late: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Forget the window after the step. Local."""
        self._reports: list[list[_Report]] = []  # The reports of each micro-batch.
        self._problems, self._late = self._late, []
        self._has_reported = False  # Whether a loop has reported for its next backward pass.
        self._total: float | None = None  # Known once the window was summed.

    def begin_micro_batch(self) -> None:
        """Expect reports of a micro-batch, of a new window if one was summed. Local; call before each training step."""
        if self._total is not None:
            self.reset()
        self._reports.append([])

    def report_before_backward(self, num_tokens: int | float | Tensor) -> None:
        """Add tokens of the loss whose backward pass comes next; for loops that announce no steps. Local."""
        if not self._has_reported:
            self.begin_micro_batch()
        self._has_reported = True
        self.report(num_tokens)

    def begin_backward(self) -> None:
        """Begin such a backward pass; without a report, total raises on all ranks. Local."""
        if not self._has_reported:
            self.begin_micro_batch()
        self._has_reported = False

    @property
    def is_summed(self) -> bool:
        """Whether the total of the window is known; local."""
        return self._total is not None

    def report(self, num_tokens: int | float | Tensor) -> None:
        """Add tokens of this rank to the micro-batch. Local; a value that is no count raises in :meth:`total`."""
        if self._total is not None:
            self._late.append(f"reported tokens after they were summed; {_WHAT_TO_DO}, not in backward")
        elif not self._reports:
            self._problems.append(f"reported tokens outside of a training step; {_WHAT_TO_DO}")
        else:
            self._reports[-1].append(_report(num_tokens))

    def total(self) -> float:
        """Tokens of the window over all ranks; errors raise on all. Collective over the group."""
        if self._total is None:
            values = torch.tensor([self._count(), bool(self._problems)], dtype=torch.float64, device="cpu")
            if self._group.group is not None:
                start_all_reduce_sum(values, self._group).wait()
            total, num_problems = values.tolist()
            if num_problems:
                rank = dist.get_rank() if dist.is_initialized() else 0
                problem = f"rank {rank} {self._problems[0]}" if self._problems else ""
                raise ValueError(next(filter(None, gather(problem, self._group))))
            self._total = float(total)
        return self._total

    def divisor(self, accumulate: int) -> float:
        """Divisor of the sums of gradients if each loss was divided by ``accumulate``. Collective over the group."""
        return max(self.total(), 1.0) / accumulate

    def _count(self) -> int:
        """Number of tokens of this rank; also notes problems of the reports."""
        total = 0
        for index, reports in enumerate(self._reports, start=1):
            where = f"in micro-batch {index} of {len(self._reports)}"
            if not reports:
                self._problems.append(f"reported no tokens {where}; {_WHAT_TO_DO}, also where n is 0")
            for report in reports:
                value = report() if callable(report) else report
                if isinstance(value, str) or not (math.isfinite(value) and value >= 0 and value == int(value)):
                    found = value if isinstance(value, str) else f"{value} as its"
                    self._problems.append(f"reported {found} number of tokens {where}; {_WHAT_TO_DO}, with {_EXPECTED}")
                else:
                    total += int(value)
        return total


def _report(num_tokens: Any) -> _Report:
    """Convert a report: a tensor is copied at once, since its owner may change it, without waiting for the copy."""
    if isinstance(num_tokens, Tensor):
        dtype = num_tokens.dtype
        # Not bool or complex, and no dtype that rounds counts over 2048 (float16) or 256 (bfloat16).
        is_exact = dtype != torch.bool and not dtype.is_complex and not (dtype.is_floating_point and dtype.itemsize < 4)
        if num_tokens.ndim or isinstance(num_tokens, DTensor) or not is_exact:
            return f"a {type(num_tokens).__name__} {tuple(num_tokens.shape)} of {dtype} as its"
        read = start_reading([num_tokens])
        return lambda: read()[0][0]
    if isinstance(num_tokens, numbers.Real) and not isinstance(num_tokens, bool):
        return int(num_tokens) if isinstance(num_tokens, numbers.Integral) else float(num_tokens)
    return f"{num_tokens!r} as its"
