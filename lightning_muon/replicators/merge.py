"""The mean of what the nodes sent, computed on every node in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_muon.replicators.replicator import Components

MERGE_RULES = ("contributors", "mean")


def merge(components: Sequence[Components], rule: str, block_numel: int) -> Components:
    """One set of components for the mean over the nodes: values of all nodes side by side, each divided.

    With ``rule="mean"`` values are divided by the number R of nodes, ``sum_r v_r / R``; with ``"contributors"`` by the
    number of nodes that sent the coefficient, as another number than 0 (DeMo, Peng et al. 2024, arXiv:2411.19870).
    Where positions are shared all nodes sent all coefficients, and both are the mean of the values.

    Args:
        components: What each node sent, in the order of the nodes; equal shapes.
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
    all_positions = [part.positions for part in components if part.positions is not None]
    if not all_positions:
        total = components[0].values.clone()
        for part in components[1:]:
            total.add_(part.values)
        return Components(total.div_(num_nodes), None)
    values = torch.cat([part.values for part in components], 1)
    if rule == "mean":
        return Components(values.div_(num_nodes), torch.cat(all_positions, 1))
    return Components(values.div_(_num_contributors(components, block_numel)), torch.cat(all_positions, 1))


def _num_contributors(components: Sequence[Components], block_numel: int) -> Tensor:
    """How many nodes sent each coefficient that a node sent, at least 1: (num_blocks, num_nodes * num_sent)."""
    positions = [part.positions for part in components if part.positions is not None]
    num_blocks = positions[0].size(0)
    starts = torch.arange(0, num_blocks * block_numel, block_numel, device=positions[0].device)[:, None]
    addresses = [(starts + part).view(-1) for part in positions]
    dtype = torch.uint8 if len(positions) < 256 else torch.int32
    counts = torch.zeros(num_blocks * block_numel, dtype=dtype, device=starts.device)
    for part, (values, _) in zip(addresses, components, strict=True):
        # Not index_add_: a node counts once, however often it sent a coefficient.
        counts.index_copy_(0, part, counts.index_select(0, part).add_((values != 0).view(-1)))
    return torch.cat([counts.index_select(0, part).view(num_blocks, -1) for part in addresses], 1).clamp_min_(1)
