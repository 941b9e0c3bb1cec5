"""The reference against what must hold by itself, so that a mistake in it does not pass for one of the package."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.reference.flexdemo import ReferenceFlexDeMo, Rules, dct, merge

SHAPES = {"odd": (13, 7), "prime": (127, 13), "stack": (3, 10, 6), "convolution": (6, 4, 3, 3), "bias": (5,)}


def _tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def _largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("size", [1, 2, 7, 13, 64])
def test_the_transform_is_orthonormal_and_finds_a_cosine(size: int) -> None:
    basis = dct(size)
    torch.testing.assert_close(basis @ basis.T, torch.eye(size, dtype=torch.float64))
    wave = torch.cos(torch.pi * (torch.arange(size, dtype=torch.float64) + 0.5) * (size - 1) / size)
    assert int((basis @ wave).abs().argmax()) == size - 1


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_all_coefficients_of_all_nodes_are_sgd_with_the_mean(ranks_per_node: int) -> None:
    rules = Rules(num_nodes=2, ranks_per_node=ranks_per_node, top_k=64 * 64, chunk_size=8, dense_below=0, lr=0.1)
    reference = ReferenceFlexDeMo(_tensors(0), rules)
    expected = _tensors(0)
    for step in range(3):
        one, two = _tensors(1 + step), _tensors(11 + step)
        reference.step([one, two])
        expected = {name: weight - 0.05 * (one[name] + two[name]) for name, weight in expected.items()}
    # Values are rounded to float32, 2^-24 of about 3 * sqrt(64) each; the residual carries it over to the next step.
    assert _largest_difference(reference.weights, expected) < 1e-6


def test_what_is_not_sent_stays_in_the_residual() -> None:
    reference = ReferenceFlexDeMo(_tensors(0), Rules(num_nodes=2, top_k=3, chunk_size=8, dense_below=16, decay=1.0))
    gradients = [_tensors(1), _tensors(2)]
    updates = reference.updates(gradients)
    assert updates["odd"].norm() < 0.9 * gradients[0]["odd"].norm()
    mean = ReferenceFlexDeMo(
        _tensors(0), Rules(num_nodes=2, top_k=3, chunk_size=8, dense_below=16, decay=1.0, merge="mean")
    )
    for name, update in mean.updates(gradients).items():
        whole = (gradients[0][name] + gradients[1][name]) / 2
        kept = (mean.residual(name, 0) + mean.residual(name, 1)) / 2
        torch.testing.assert_close(update + kept, whole)


def test_merging_divides_by_the_nodes_that_sent_or_by_all() -> None:
    messages = [{(0, 1): 6.0, (0, 2): 3.0}, {(0, 1): 3.0}, {(0, 1): 0.0, (0, 3): 9.0}]
    assert merge(messages, "contributors") == {(0, 1): 3.0, (0, 2): 3.0, (0, 3): 9.0}
    assert merge(messages, "mean") == {(0, 1): 3.0, (0, 2): 1.0, (0, 3): 3.0}
