"""The counted work is that of an iteration which gives what Newton-Schulz gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_muon.math.newton_schulz import newton_schulz_flops, orthogonalize
from lightning_muon.schedule.gram import GRAM_ITEMSIZE, ends_flops, gram_costs, iteration_flops

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def _iterate(gram: Tensor, num_steps: int) -> Tensor:
    """Q with ``X Q`` the result of Newton-Schulz, from ``G = X^T X`` alone."""
    a, b, c = _COEFFICIENTS
    identity = torch.eye(len(gram), dtype=gram.dtype)
    factor = identity
    for step in range(num_steps):
        polynomial = a * identity + b * gram + c * (gram @ gram)
        factor = polynomial if step == 0 else factor @ polynomial
        if step < num_steps - 1:
            gram = polynomial @ gram @ polynomial
    return factor


def test_gram_matrices_summed_over_pieces_give_newton_schulz() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(60, 12, dtype=torch.float64)
    expected = orthogonalize(matrix, coefficients=_COEFFICIENTS, num_steps=5, eps=1e-7, compute_dtype=torch.float64)
    pieces = (matrix / matrix.norm()).split(25)
    with FlopCounterMode(display=False) as counter:
        factor = _iterate(torch.stack([piece.mT @ piece for piece in pieces]).sum(0), 5)
        result = torch.cat([piece @ factor for piece in pieces])
    # Exact arithmetic is the same; float64 rounds in another order.
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    assert counter.get_total_flops() == ends_flops(60, 12) + iteration_flops(12, 5)


def test_one_owner_saves_flops_for_long_matrices_only() -> None:
    # 4 l s^2 + 34 s^3 < 20 l s^2 + 10 s^3 if l > 1.5 s.
    assert ends_flops(150, 100) + iteration_flops(100, 5) == newton_schulz_flops(150, 100, 5)
    assert ends_flops(160, 100) + iteration_flops(100, 5) < newton_schulz_flops(160, 100, 5)
    assert ends_flops(100, 100) + iteration_flops(100, 5) > newton_schulz_flops(100, 100, 5)


def test_costs_of_two_tall_matrices_on_four_ranks() -> None:
    all_reduce, owners, groups = gram_costs([(40, 10)] * 2, num_ranks=4, num_steps=5, itemsize=2)
    iteration, ends, gram_bytes = 2 * 10**3 * 17, 4 * 40 * 10**2, 10 * 10 * GRAM_ITEMSIZE
    assert all_reduce.flops == 2 * ends // 4 + 2 * iteration
    assert owners.flops == 2 * ends // 4 + iteration
    assert all_reduce.bytes == owners.bytes == 2 * 2 * gram_bytes * 3 // 4
    assert groups.name == "groups of 2"
    assert groups.flops == ends // 2 + iteration
    # Half a matrix in and out, and half of the Gram matrix in each of the two phases of an all-reduce.
    assert groups.bytes == 2 * 2 * 400 // 2 + 2 * gram_bytes // 2


def test_matrices_with_few_rows_are_cut_again_along_the_long_side() -> None:
    tall = gram_costs([(40, 10)], num_ranks=4, num_steps=5, itemsize=2)[0]
    wide = gram_costs([(10, 40)], num_ranks=4, num_steps=5, itemsize=2)[0]
    assert wide.flops == tall.flops
    # A quarter of 400 elements, once each way, but for the quarter of it that stays.
    assert wide.bytes - tall.bytes == pytest.approx(2 * 2 * 400 / 4 * 3 / 4)


def test_groups_have_at_least_one_rank() -> None:
    groups = gram_costs([(40, 10)] * 5, num_ranks=2, num_steps=5, itemsize=2)[2]
    assert groups.name == "groups of 1"
    assert groups.flops == 3 * (ends_flops(40, 10) + iteration_flops(10, 5))
