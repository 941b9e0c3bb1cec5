"""The mean of what the nodes sent, computed on every node in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_muon.flexdemo.replicator import Components

MERGE_RULES = ("contributors", "mean")
# Coefficients of blocks that are summed at a time on a CPU: 2 MiB, which stay in a cache.
_SUMMED_TOGETHER = 1 << 19


def merge(components: Sequence[Components], rule: str, block_numel: int) -> Components:
    """One set of components for the mean over the nodes: indices of all nodes side by side, each mean once.

    With ``rule="mean"`` sums over the nodes are divided by their number R, ``sum_r v_r / R``; with ``"contributors"``
    by the number of nodes that sent the coefficient, as another number than 0 (DeMo, Peng et al. 2024,
    arXiv:2411.19870). Where indices are shared all nodes sent all coefficients, and both are the mean of the values.

    Sums are made node by node, so that every node gets the same bits on any device. Of several nodes that sent a
    position the first one has the mean and the others have 0, so that a decoder may add them up in any order.

    Args:
        components: What each node sent, in the order of the nodes; equal shapes, no position twice in a block.
        rule: ``"contributors"`` or ``"mean"``.
        block_numel: Elements of a block.

    Returns:
        (num_blocks, R * num_sent) values and indices; with shared indices (num_blocks, num_sent) values.
    """
    if rule not in MERGE_RULES:
        raise ValueError(f"merge must be one of {', '.join(MERGE_RULES)}, got {rule!r}")
    num_nodes = len(components)
    if num_nodes == 1:
        return components[0]
    indices = [part.indices for part in components if part.indices is not None]
    if not indices:
        total = components[0].values.clone()
        for part in components[1:]:
            total.add_(part.values)
        return Components(total.div_(num_nodes), None)
    sent = torch.stack([part.values for part in components])
    means = torch.empty_like(sent)
    num_blocks = sent.size(1)
    size = max(1, _SUMMED_TOGETHER // block_numel) if sent.device.type == "cpu" else max(1, num_blocks)
    sums = sent.new_zeros(min(size, num_blocks), block_numel)
    for first in range(0, num_blocks, size):
        group = slice(first, first + size)
        of_group = [part[group] for part in indices]
        _sum(sums, of_group, sent[:, group], means[:, group])
        if rule == "mean":
            means[:, group].div_(num_nodes)
        else:
            num_contributors = (sent[:, group] != 0).float()
            _sum(sums, of_group, num_contributors, num_contributors)
            means[:, group].div_(num_contributors.clamp_min_(1))
    return Components(torch.cat(means.unbind(), 1), torch.cat(indices, 1))


def _sum(zeros: Tensor, indices: Sequence[Tensor], of_nodes: Tensor, out: Tensor) -> None:
    """Write the sum over the nodes at each position into ``out``, for the first node that has it; 0 for the others.

    Args:
        zeros: (at least num_blocks, block_numel); zeros again afterwards.
        indices: Of each node, (num_blocks, num_sent).
        of_nodes: Values (num_nodes, num_blocks, num_sent), added in the order of the nodes.
        out: Of the same shape, or the same tensor.
    """
    sums = zeros[: of_nodes.size(1)]
    for places, values in zip(indices, of_nodes, strict=True):
        # Not scatter_add_, whose order differs from run to run on CUDA.
        sums.scatter_(1, places, sums.gather(1, places).add_(values))
    for places, merged in zip(indices, out, strict=True):
        torch.gather(sums, 1, places, out=merged)
        sums.scatter_(1, places, 0.0)
