"""NorMuon and Hyperball against their formulas, at their limits."""

import math

import pytest
import torch

from lightning_muon.math.normalize import NUM_SUMS, hyperball_factors, hyperball_sums, normalize_neurons


@pytest.mark.parametrize(("rows", "cols"), [(13, 7), (7, 13), (1, 9), (9, 1)])
def test_normuon_evens_out_rows_and_keeps_the_norm(rows: int, cols: int) -> None:
    torch.manual_seed(0)
    update = torch.randn(rows, cols) * torch.logspace(-2, 1, rows)[:, None]
    found, moment = normalize_neurons(update.bfloat16(), torch.zeros(rows), beta2=0.9)
    torch.testing.assert_close(moment, 0.1 * update.bfloat16().float().square().mean(1))
    torch.testing.assert_close(found.norm(), torch.tensor(math.sqrt(min(rows, cols))))
    # After one step each row is divided by its own norm.
    torch.testing.assert_close(found.norm(dim=1), torch.full((rows,), math.sqrt(min(rows, cols) / rows)))


def test_zeros_stay_zeros() -> None:
    found, moment = normalize_neurons(torch.zeros(3, 4), torch.zeros(3), beta2=0.9)
    assert not found.any() and not moment.any()
    # No matrix, no update, and both.
    weights, updates = torch.stack([torch.zeros(2, 2), torch.eye(2)]), torch.zeros(2, 2)
    sums = torch.stack([hyperball_sums(weight, updates) for weight in weights])
    radius, scale, rate = hyperball_factors(sums, torch.zeros(2), 0.1)
    assert radius.tolist() == [0.0, math.sqrt(2.0)] or torch.allclose(radius, torch.tensor([0.0, 2.0]).sqrt())
    assert scale.tolist() == [1.0, 1.0] and rate.tolist() == [0.0, 0.0]


def test_a_hyperball_step_is_that_of_the_formula() -> None:
    torch.manual_seed(0)
    weight, update, lr = torch.randn(13, 7), torch.randn(13, 7), 0.3
    pieces = [hyperball_sums(*each) for each in zip(weight.split(5), update.split(5), strict=True)]
    sums = torch.stack(pieces).sum(0, keepdim=True)
    assert sums.shape == (1, NUM_SUMS)
    for known in (0.0, 2.5):
        radius, scale, rate = hyperball_factors(sums, torch.tensor([known]), lr)
        wanted = known or float(weight.norm())
        ahead = weight - lr * wanted * update / update.norm()
        torch.testing.assert_close(scale * weight - rate * update, wanted * ahead / ahead.norm())
        torch.testing.assert_close(radius, torch.tensor([wanted]))
