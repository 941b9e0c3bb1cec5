"""Newton-Schulz against torch's own and against the singular value decomposition."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_muon.config import MuonConfig
from lightning_muon.math.newton_schulz import newton_schulz_flops, orthogonalize
from tests.reference.muon import orthogonalized

OPTIONS = {"coefficients": MuonConfig.ns_coefficients, "num_steps": 5, "eps": 1e-7}
SHAPES = [(13, 7), (64, 64), (3, 200), (1, 9), (200, 3), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_matrix_in_bfloat16_has_the_bits_of_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(sum(shape))
    grad = torch.randn(shape)
    weight = nn.Parameter(torch.zeros(shape))
    weight.grad = grad
    # From zero weights, with no momentum and lr 1, torch.optim.Muon leaves just the negative update.
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    scale = max(1, shape[0] / shape[1]) ** 0.5
    expected = torch.zeros(shape).add_(orthogonalize(grad, compute_dtype=torch.bfloat16, **OPTIONS), alpha=-scale)
    assert torch.equal(weight.detach(), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_agrees_with_the_reference_bit_for_bit(shape: tuple[int, int]) -> None:
    torch.manual_seed(sum(shape))
    matrix = torch.randn(shape)
    assert torch.equal(orthogonalize(matrix, compute_dtype=torch.float32, **OPTIONS), orthogonalized(matrix))


@pytest.mark.parametrize("shape", [(40, 40), (20, 90), (90, 20)], ids=str)
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    u, _, vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    rank = min(shape)
    singular = torch.linspace(0.05, 1.0, rank)
    result = orthogonalize(u @ singular.diag() @ vh, compute_dtype=torch.float32, **OPTIONS)
    found = u.T @ result @ vh.T
    # Off-diagonal entries are rounding only; the polynomial maps [0.01, 1] into [0.68, 1.21] after five steps.
    assert (found - found.diag().diag()).abs().max() < 1e-4
    assert found.diag().min() > 0.65 and found.diag().max() < 1.25


def test_a_batch_gives_each_matrix_its_own_result() -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 3, 8, 5)
    result = orthogonalize(batch, compute_dtype=torch.float32, **OPTIONS)
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3)):
        alone = orthogonalize(batch[tuple(index)], compute_dtype=torch.float32, **OPTIONS)
        # The batched product adds in another order.
        torch.testing.assert_close(result[tuple(index)], alone, rtol=0, atol=1e-5)


def test_a_zero_matrix_stays_zero_and_the_input_is_not_changed() -> None:
    zero = torch.zeros(4, 6)
    assert not orthogonalize(zero, compute_dtype=torch.float32, **OPTIONS).any()
    matrix = torch.randn(4, 6)
    before = matrix.clone()
    orthogonalize(matrix, compute_dtype=torch.float32, **OPTIONS)
    assert torch.equal(matrix, before)


def test_flops_are_counted_per_product() -> None:
    # rows 2, cols 3: gram 2*2*2*3, square 2*2*2*2, last product 2*2*2*3, once.
    assert newton_schulz_flops(2, 3, 1) == newton_schulz_flops(3, 2, 1) == 24 + 16 + 24
    assert newton_schulz_flops(2, 3, 5) == 5 * 64
