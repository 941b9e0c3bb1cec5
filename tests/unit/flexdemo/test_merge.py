"""The mean over nodes against a loop over dictionaries."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from lightning_muon.flexdemo.bucket import merge
from lightning_muon.flexdemo.replicators import Components
from tests.support.atomics import NoAtomics


def sent(num_nodes: int, num_blocks: int, num_sent: int, numel: int) -> list[Components]:
    """Distinct indices in each block, as of a top-k."""
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
        contributors = Counter(p for node in nodes for p in set(node.indices[block].tolist()))
        for values, indices in nodes:
            for value, position in zip(values[block].tolist(), indices[block].tolist(), strict=True):
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
    assert merged.values.shape == merged.indices.shape == (num_blocks, num_nodes * num_sent)
    dense = torch.zeros(num_blocks, numel, dtype=torch.float64)
    dense.scatter_add_(1, merged.indices, merged.values.double())
    # One division in float32.
    assert torch.allclose(dense, reference(nodes, rule, num_blocks, numel), atol=1e-6)
    assert all(torch.equal(node.values, old) for node, old in zip(nodes, before, strict=True))


def test_a_zero_is_no_contribution() -> None:
    nodes = [
        Components(torch.tensor([[1.0, 0.0, 4.0]]), torch.tensor([[6, 3, 1]])),
        Components(torch.tensor([[8.0, 16.0, 0.0]]), torch.tensor([[2, 6, 1]])),
    ]
    assert merge(nodes, "contributors", 7).values.tolist() == [[8.5, 0.0, 4.0, 8.0, 0.0, 0.0]]
    assert merge(nodes, "mean", 7).values.tolist() == [[8.5, 0.0, 2.0, 4.0, 0.0, 0.0]]


@pytest.mark.parametrize("rule", ["contributors", "mean"])
@pytest.mark.parametrize("num_nodes", [2, 3, 5])
def test_sums_are_made_in_the_order_of_the_nodes_without_atomics(rule: str, num_nodes: int) -> None:
    """Bit for bit, for more blocks than are summed at a time."""
    torch.manual_seed(num_nodes)
    num_blocks, num_sent, numel = 300, 40, 64 * 64
    # Many nodes send the same indices.
    nodes = [node._replace(indices=node.indices * 67) for node in sent(num_nodes, num_blocks, num_sent, 60)]
    with NoAtomics():
        merged = merge(nodes, rule, numel)
    expected = torch.zeros(num_blocks, numel)
    counts = torch.zeros(num_blocks, numel)
    for values, indices in nodes:
        for column in range(num_sent):
            place = indices[:, column : column + 1]
            expected.scatter_(1, place, expected.gather(1, place) + values[:, column : column + 1])
            counts.scatter_(1, place, counts.gather(1, place) + 1)
    expected /= num_nodes if rule == "mean" else counts.clamp(min=1)
    found = torch.zeros(num_blocks, numel)
    for column in torch.randperm(merged.values.size(1)).tolist():
        place = merged.indices[:, column : column + 1]
        found.scatter_(1, place, found.gather(1, place) + merged.values[:, column : column + 1])
    assert torch.equal(found, expected)
