"""The mean over nodes against a loop over dictionaries."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from lightning_muon.replicators.merge import merge
from lightning_muon.replicators.replicator import Components


def sent(num_nodes: int, num_blocks: int, num_sent: int, numel: int) -> list[Components]:
    """Distinct positions in each block, as of a top-k."""
    return [
        Components(
            torch.randn(num_blocks, num_sent),
            torch.stack([torch.randperm(numel)[:num_sent] for _ in range(num_blocks)]),
        )
        for _ in range(num_nodes)
    ]


def reference(nodes: list[Components], rule: str, num_blocks: int, numel: int) -> Tensor:
    """Dense coefficients (num_blocks, numel), float64."""
    dense = torch.zeros(num_blocks, numel, dtype=torch.float64)
    for block in range(num_blocks):
        contributors = Counter(p for node in nodes for p in set(node.positions[block].tolist()))
        for values, positions in nodes:
            for value, position in zip(values[block].tolist(), positions[block].tolist(), strict=True):
                divisor = len(nodes) if rule == "mean" else contributors[position]
                dense[block, position] += value / divisor
    return dense


@pytest.mark.parametrize("rule", ["contributors", "mean"])
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5])
@pytest.mark.parametrize(("num_blocks", "num_sent", "numel"), [(1, 1, 1), (4, 5, 13), (3, 40, 127), (2, 64, 64)])
def test_values_are_divided_by_the_nodes_of_the_rule(
    rule: str, num_nodes: int, num_blocks: int, num_sent: int, numel: int
) -> None:
    torch.manual_seed(num_nodes + numel)
    nodes = sent(num_nodes, num_blocks, num_sent, numel)
    before = [node.values.clone() for node in nodes]
    merged = merge(nodes, rule, numel)
    assert merged.values.shape == merged.positions.shape == (num_blocks, num_nodes * num_sent)
    dense = torch.zeros(num_blocks, numel, dtype=torch.float64)
    dense.scatter_add_(1, merged.positions, merged.values.double())
    # One division in float32.
    assert torch.allclose(dense, reference(nodes, rule, num_blocks, numel), atol=1e-6)
    assert all(torch.equal(node.values, old) for node, old in zip(nodes, before, strict=True))


def test_a_node_counts_once_for_a_coefficient_that_it_sent_twice() -> None:
    nodes = [
        Components(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[6, 6, 1]])),
        Components(torch.tensor([[8.0, 16.0, 32.0]]), torch.tensor([[2, 6, 2]])),
    ]
    assert merge(nodes, "contributors", 7).values.tolist() == [[0.5, 1.0, 4.0, 8.0, 8.0, 32.0]]


def test_more_nodes_than_a_byte_counts() -> None:
    nodes = [Components(torch.full((1, 1), 600.0), torch.tensor([[3]]))] * 300
    assert torch.equal(merge(nodes, "contributors", 5).values, torch.full((1, 300), 2.0))


@pytest.mark.parametrize("rule", ["contributors", "mean"])
@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_values_at_shared_positions_are_averaged(rule: str, num_nodes: int) -> None:
    nodes = [Components(torch.randn(1, 127), None) for _ in range(num_nodes)]
    before = [node.values.clone() for node in nodes]
    merged = merge(nodes, rule, 127)
    assert merged.positions is None
    assert torch.allclose(merged.values, torch.stack(before).double().mean(0).float(), atol=1e-6)
    assert all(torch.equal(node.values, old) for node, old in zip(nodes, before, strict=True))


def test_an_unknown_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match="merge must be one of contributors, mean, got 'sum'"):
        merge(sent(1, 1, 1, 1), "sum", 1)
