"""The mean of what the nodes sent, computed on every node in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_muon.replicators.replicator import Components

MERGE_RULES = ("contributors", "mean")
# Coefficients of blocks that are summed at a time on a CPU: 2 MiB, a second-level cache.
_SUMMED_TOGETHER = 1 << 19


def merge(components: Sequence[Components], rule: str, block_numel: int) -> Components:
    """One set of components for the mean over the nodes: positions of all nodes side by side, each mean once.

    With ``rule="mean"`` sums over the nodes are divided by their number R, ``sum_r v_r / R``; with ``"contributors"``
    by the number of nodes that sent the coefficient, as another number than 0 (DeMo, Peng et al. 2024,
    arXiv:2411.19870). Where positions are shared all nodes sent all coefficients, and both are the mean of the values.

    Sums are made node by node, so that every node gets the same bits on any device. Of several nodes that sent a
    position the first one has the mean and the others have 0, so that a decoder may add them up in any order.

    Args:
        components: What each node sent, in the order of the nodes; equal shapes, no position twice in a block.
        rule: ``"contributors"`` or ``"mean"``.
        block_numel: Elements of a block.

    Returns:
        (num_blocks, R * num_sent) values and positions; with shared positions (num_blocks, num_sent) values.
    """
    if rule not in MERGE_RULES:
        raise ValueError(f"merge must be one of {', '.join(MERGE_RULES)}, got {rule!r}")
    num_nodes = len(components)
    if num_nodes == 1:
        return components[0]
    positions = [part.positions for part in components if part.positions is not None]
    if not positions:
        total = components[0].values.clone()
        for part in components[1:]:
            total.add_(part.values)
        return Components(total.div_(num_nodes), None)
    sent = torch.stack([part.values for part in components])
    means = torch.empty_like(sent)
    num_blocks = sent.size(1)
    size = max(1, _SUMMED_TOGETHER // block_numel) if sent.device.type == "cpu" else max(1, num_blocks)
    sums = sent.new_zeros(min(size, num_blocks) * block_numel)
    counts = torch.zeros_like(sums) if rule == "contributors" else None
    starts = torch.arange(0, sums.numel(), block_numel, device=sums.device)[:, None]
    for first in range(0, num_blocks, size):
        group = slice(first, first + size)
        addresses = [(starts[: part[group].size(0)] + part[group]).view(-1) for part in positions]
        _sum(sums, addresses, sent[:, group], means[:, group])
        if counts is None:
            means[:, group].div_(num_nodes)
        else:
            has_sent = (sent[:, group] != 0).float()
            _sum(counts, addresses, has_sent, has_sent)
            means[:, group].div_(has_sent.clamp_min_(1))
    return Components(torch.cat(means.unbind(), 1), torch.cat(positions, 1))


def _sum(zeros: Tensor, addresses: Sequence[Tensor], of_nodes: Tensor, out: Tensor) -> None:
    """Write the sum over the nodes at each address into ``out``, for the first node that has it; 0 for the others.

    Args:
        zeros: A place for all addresses; zeros again afterwards.
        addresses: Of each node, (num_blocks * num_sent,), each once.
        of_nodes: Values (num_nodes, num_blocks, num_sent), added in the order of the nodes.
        out: Of the same shape, or the same tensor.
    """
    for address, values in zip(addresses, of_nodes, strict=True):
        # Not index_add_, whose order differs from run to run on CUDA.
        zeros.index_copy_(0, address, zeros.index_select(0, address).add_(values.reshape(-1)))
    for address, sums in zip(addresses, out, strict=True):
        sums.copy_(zeros.index_select(0, address).view_as(sums))
        zeros.index_fill_(0, address, 0.0)
