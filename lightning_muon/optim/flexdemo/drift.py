"""Whether the nodes still hold the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.agreement import fail_together
from lightning_muon.comm.mesh import AxisGroup
from lightning_muon.params.layout import local_tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_equal_on_nodes(
    parameters: Sequence[Tensor], names: Mapping[Tensor, str], *, nodes: AxisGroup, everyone: AxisGroup
) -> None:
    """Raise on all ranks if a parameter has other bits on one node than on the first.

    Collective over ``everyone``; every rank must call it.

    Args:
        parameters: In the same order on all ranks.
        names: Of them.
        nodes: The ranks that hold the same shards; for tensors in the memory of the host.
        everyone: All ranks of all nodes; likewise.
    """
    error: RuntimeError | None = None
    if nodes.group is not None:
        mine = checksums(parameters).cpu()
        of_nodes = [torch.empty_like(mine) for _ in range(nodes.size)]
        dist.all_gather(of_nodes, mine, group=nodes.group)
        differing = [
            (names[parameter], [node for node, sums in enumerate(of_nodes) if sums[index] != of_nodes[0][index]])
            for index, parameter in enumerate(parameters)
        ]
        drifted = [f"{name} (node {', '.join(map(str, found))})" for name, found in differing if found]
        if drifted:
            error = RuntimeError(
                f"{len(drifted)} parameters are not what they are on node 0: {', '.join(drifted[:5])}. Something has "
                "changed weights on one node only, for example a callback that runs on rank 0; let it run on all "
                "ranks, and load the last checkpoint"
            )
    fail_together(error, everyone.group)


def checksums(parameters: Sequence[Tensor]) -> Tensor:
    """Sum of the bits of each local shard, read as integers, times odd numbers: (num_parameters,) int64."""
    sums: list[Tensor] = []
    for parameter in parameters:
        local = local_tensor(parameter).detach().reshape(-1)
        bits = local.view(_INTEGERS[local.element_size()]).to(torch.int64, copy=True)
        # A factor for each place, so that elements that have changed places show.
        sums.append(bits.mul_(torch.arange(1, 2 * bits.numel() + 1, 2, device=bits.device)).sum())
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)
