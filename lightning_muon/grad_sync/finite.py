"""NaN and Inf in gradients: found on any rank, known to all of them, and skipped for a few steps at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.collectives import start_all_reduce_sum, start_reading
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.errors import NonFiniteGradientError
from lightning_muon.grad_sync.clipping import Sharers, by_ranks, local_norms, part_of_gradient
from lightning_muon.params.layout import Layout

_TENSORS = Layout()


class FiniteCheck:
    """Decides whether a step is skipped, and counts the skipped ones; the same on all ranks, no communication.

    Args:
        max_skipped_steps: So many steps in a row may be skipped; with 0 the first NaN or Inf raises.

    Attributes:
        skipped_steps: Steps that were skipped so far.
        in_a_row: Those among them since the last step that was taken.

    Example::

        check = FiniteCheck()
        assert not check.observe([])
        assert check.observe(["layers.0.weight"])  # leave weights and optimizer state as they are
        assert check.skipped_steps == 1
    """

    def __init__(self, max_skipped_steps: int = 3) -> None:
        if isinstance(max_skipped_steps, bool) or not isinstance(max_skipped_steps, int) or max_skipped_steps < 0:
            raise ValueError(f"max_skipped_steps must be a whole number of at least 0, got {max_skipped_steps!r}")
        self.max_skipped_steps = max_skipped_steps
        self.skipped_steps = 0
        self.in_a_row = 0

    def observe(self, nonfinite_names: Sequence[str]) -> bool:
        """Whether to skip the step whose gradients have a NaN or an Inf in the named parameters.

        Local; every rank must call it with the same names, as :func:`find_nonfinite` returns them.

        Raises:
            NonFiniteGradientError: If one more step in a row than ``max_skipped_steps`` had to be skipped.
        """
        if not nonfinite_names:
            self.in_a_row = 0
            return False
        if self.in_a_row >= self.max_skipped_steps:
            raise NonFiniteGradientError(self._message(nonfinite_names))
        self.in_a_row += 1
        self.skipped_steps += 1
        return True

    def _message(self, names: Sequence[str]) -> str:
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        before = (
            f", after {self.in_a_row} skipped steps in a row ({self.skipped_steps} in all)" if self.in_a_row else ""
        )
        return (
            f"NaN or Inf in the norm of the gradient of {listed}{before}. The step was not taken: weights and "
            "optimizer state are unchanged on all ranks. Lower the learning rate, clip gradients, or look for a bad "
            f"batch; max_skipped_steps={self.max_skipped_steps} says how many such steps in a row may be skipped."
        )


@torch.no_grad()
def find_nonfinite(
    parameters: Sequence[Tensor],
    names: Mapping[Tensor, str],
    *,
    layout: Layout = _TENSORS,
    known_norm: Tensor | None = None,
    pipeline: AxisGroup | None = None,
) -> list[str]:
    """Names of the parameters whose gradient has a NaN or an Inf on any rank.

    The rank's part of a gradient whose norm overflows to Inf counts as non-finite too: torch sums squares in float32,
    so that is a norm over 1.8e19.

    Collective over the meshes of ``parameters`` (one small all-reduce for each distinct set of ranks, the smallest sets
    first, so that what one finds out reaches the larger ones) and over ``pipeline``; every rank must call it, also
    without gradients. The names are equal on all ranks of the largest set, and with ``pipeline`` on all of its ranks.
    The host waits for the device once. With a finite ``known_norm`` there is no communication.

    Args:
        parameters: In the same order on all ranks that share a mesh.
        names: Name of each parameter.
        layout: Where their parts and gradients lie.
        known_norm: Norm of these gradients (at least) all together, if clipping has taken it, with the same
            ``pipeline``; equal on all ranks.
        pipeline: Ranks that hold other layers, which skip the step too.
    """
    if known_norm is not None and bool(known_norm.isfinite()):
        return []
    sharers = sorted(by_ranks(parameters, layout, sharded=False), key=lambda each: each.group.size)
    counts = _count_on_all_ranks(sharers, layout, pipeline)
    found: list[str] = []
    for each, per_parameter in zip(sharers, counts, strict=False):
        bad = [names[parameter] for parameter, count in zip(each.parameters, per_parameter, strict=False) if count]
        found = _merged([*found, *bad], each.group, is_needed=per_parameter[-1] > 0)
    if pipeline is not None:
        found = _merged(found, pipeline, is_needed=counts[-1][-1] > 0)
    return found


def _count_on_all_ranks(sharers: Sequence[Sharers], layout: Layout, pipeline: AxisGroup | None) -> list[list[int]]:
    """For every set of ranks: how many of them find each of its parameters broken, and how many know of any.

    The last entry of each list says of how many ranks one knew before of a smaller set; one more list for ``pipeline``.
    Collective over all sets; every rank of them must call it.
    """
    device = next((each.device for each in sharers if each.device.type != "cpu"), torch.device("cpu"))
    known = torch.zeros(1, dtype=torch.int32, device=device)
    counts: list[Tensor] = []
    for each in sharers:
        flags = torch.cat([_flags(each, layout), known.to(each.device)])
        if each.group.group is not None:
            start_all_reduce_sum(flags, each.group).wait()
        counts.append(flags.to(device))
        known = flags.any().int().reshape(1).to(device)
    if pipeline is not None:
        if pipeline.group is not None:
            start_all_reduce_sum(known, pipeline).wait()
        counts.append(known)
    return start_reading(counts)()


def _flags(sharers: Sharers, layout: Layout) -> Tensor:
    """1 for each parameter whose gradient is not finite on this rank, int32, on the device of the group."""
    gradients = [part_of_gradient(parameter, layout) for parameter in sharers.parameters]
    # The 2-norm, since the infinity norm and isfinite are 15 to 20 times slower on a CPU.
    norms = iter(local_norms([gradient for gradient in gradients if gradient is not None]))
    fine = torch.zeros((), device=sharers.device)
    every = [fine if gradient is None else next(norms).to(sharers.device) for gradient in gradients]
    return torch.stack(every or [fine]).isfinite().logical_not().int()[: len(every)]


def _merged(names: list[str], group: AxisGroup, *, is_needed: bool) -> list[str]:
    """The names that any rank of ``group`` knows, in the order of its ranks, each once.

    Collective over ``group`` where ``is_needed``, which must be equal on all of its ranks.
    """
    gathered = [names]
    if is_needed and group.group is not None:
        gathered = [[] for _ in range(group.size)]
        dist.all_gather_object(gathered, names, group=group.group)
    return list(dict.fromkeys(name for each in gathered for name in each))
