"""NaN and Inf in gradients: found on any rank, known to all of them, and skipped for a few steps at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.collectives import start_all_reduce_sum, start_reading
from lightning_muon.errors import NonFiniteGradientError
from lightning_muon.grad_sync.clipping import RankSet, by_ranks, common_device, local_norms, part_of_gradient
from lightning_muon.params.layout import Layout

_TENSORS = Layout()


class FiniteCheck:
    """Decides whether a step is skipped, and counts the skipped ones; the same on all ranks, no communication."""

    def __init__(self, max_skipped_steps: int) -> None:
        self._max_skipped_steps = max_skipped_steps
        self._in_a_row = 0
        self.skipped_steps = 0

    def observe(self, nonfinite_names: Sequence[str]) -> bool:
        """Whether to skip the step, or raise after too many. Local; every rank must call it with the same names."""
        if not nonfinite_names:
            self._in_a_row = 0
            return False
        if self._in_a_row < self._max_skipped_steps:
            self._in_a_row += 1
            self.skipped_steps += 1
            return True
        more = len(nonfinite_names) - 5
        listed = ", ".join(nonfinite_names[:5]) + (f" and {more} more" if more > 0 else "")
        if self._in_a_row:
            listed += f", after {self._in_a_row} skipped steps in a row ({self.skipped_steps} in all)"
        raise NonFiniteGradientError(
            f"NaN or Inf in the norm of the gradient of {listed}. The step was not taken: weights and "
            "optimizer state are unchanged on all ranks. Lower the learning rate, clip gradients, or look for a bad "
            f"batch; max_skipped_steps={self._max_skipped_steps} says how many such steps in a row may be skipped."
        )


@torch.no_grad()
def find_nonfinite(
    parameters: Sequence[Tensor], names: Mapping[Tensor, str], *, layout: Layout = _TENSORS
) -> list[str]:
    """Names of the parameters whose gradient has a NaN or an Inf on any rank, or a norm on one rank over 1.8e19.

    Collective over the meshes of ``parameters``; every rank must call it with the parameters in the same order, also
    without gradients. The names are equal on all ranks of the largest mesh. The host waits for the device once.
    """
    # The smallest sets first, so that what one finds out reaches the larger ones.
    sets = sorted(by_ranks(parameters, layout, sharded=False), key=lambda each: each.group.size)
    device = common_device(sets)
    # For each set: how many of its ranks find each parameter broken, and how many knew of any in a smaller set.
    counts: list[Tensor] = []
    known = torch.zeros(1, dtype=torch.int32, device=device)
    for each in sets:
        flags = torch.cat([_flags(each, layout), known.to(each.device)])
        if each.group.group is not None:
            start_all_reduce_sum(flags, each.group).wait()
        counts.append(flags.to(device))
        known = flags.any().int().reshape(1).to(device)
    found: list[str] = []
    for each, (*broken, num_knowing) in zip(sets, start_reading(counts)(), strict=True):
        found += [names[parameter] for parameter, count in zip(each.parameters, broken, strict=True) if count]
        if num_knowing and each.group.group is not None:
            found = list(chain.from_iterable(gather(found, each.group.group)))
    return list(dict.fromkeys(found))


def _flags(ranks: RankSet, layout: Layout) -> Tensor:
    """1 for each parameter whose gradient is not finite on this rank, int32, on the device of the group."""
    gradients = [part_of_gradient(parameter, layout) for parameter in ranks.parameters]
    # The 2-norm, since the infinity norm and isfinite are 15 to 20 times slower on a CPU.
    norms = iter(local_norms([gradient for gradient in gradients if gradient is not None]))
    fine = torch.zeros((), device=ranks.device)
    every = [fine if gradient is None else next(norms).to(ranks.device) for gradient in gradients]
    return torch.stack(every).isfinite().logical_not().int()
