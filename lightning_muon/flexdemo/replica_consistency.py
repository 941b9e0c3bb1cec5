"""Whether the nodes still hold the same weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import fail_together
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.params.layout import local_tensor

_NOT_SHARDED = (
    ". FSDP2 does not average the gradients of parameters that it does not shard (0-d ones, ignored_params): do it "
    "before step(), over the ranks of each node"
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_equal(tensors: Sequence[tuple[str, Tensor]], *, nodes: AxisGroup, everyone: AxisGroup) -> None:
    """Raise on all ranks if a tensor has other bits on one node, or a plain one on any rank, than on the first.

    Collective over ``everyone``; every rank must call it.

    Args:
        tensors: By name, in the same order on all ranks.
        nodes: The ranks that hold the same shards; for tensors in the memory of the host.
        everyone: All ranks of all nodes; likewise.
    """
    sharded = [(name, tensor) for name, tensor in tensors if isinstance(tensor, DTensor)]
    plain = [(name, tensor) for name, tensor in tensors if not isinstance(tensor, DTensor)]
    drifted = [f"{name} (node {ranks})" for name, ranks in _differing(sharded, nodes)]
    not_sharded = [f"{name} (rank {ranks} of all nodes)" for name, ranks in _differing(plain, everyone)]
    drifted += not_sharded
    error: RuntimeError | None = None
    if drifted:
        error = RuntimeError(
            f"{len(drifted)} parameters are not what they are on node 0: {', '.join(drifted[:5])}. The nodes have "
            "begun with different weights, or their learning rates differ (a scheduler that follows the loss of one "
            "rank), or something has changed weights on some of them only, such as a callback that runs on rank 0; let "
            "it be the same on all ranks, and load the last checkpoint" + (_NOT_SHARDED if not_sharded else "")
        )
    fail_together(error, everyone.group)


def _differing(tensors: Sequence[tuple[str, Tensor]], ranks: AxisGroup) -> list[tuple[str, str]]:
    """Names of the tensors that differ from those of the first rank, and where.

    Collective over ``ranks``; every rank must call it.
    """
    if ranks.group is None or not tensors:
        return []
    mine = checksums([tensor for _, tensor in tensors]).cpu()
    of_ranks = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(of_ranks, mine, group=ranks.group)
    found = [
        (name, [rank for rank, sums in enumerate(of_ranks) if sums[index] != of_ranks[0][index]])
        for index, (name, _) in enumerate(tensors)
    ]
    return [(name, ", ".join(map(str, where))) for name, where in found if where]


def checksums(parameters: Sequence[Tensor]) -> Tensor:
    """Sum of the bits of each local shard, read as integers, times odd numbers: (num_parameters,) int64."""
    sums: list[Tensor] = []
    for parameter in parameters:
        local = local_tensor(parameter).detach().reshape(-1)
        bits = local.view(_INTEGERS[local.element_size()]).to(torch.int64, copy=True)
        # A factor for each place, so that elements that have changed places show.
        sums.append(bits.mul_(torch.arange(1, 2 * bits.numel() + 1, 2, device=bits.device)).sum())
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device="cpu")
