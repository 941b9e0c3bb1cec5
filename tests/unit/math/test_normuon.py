"""NorMuon against its formula, at its limits."""

import math

import pytest
import torch

from lightning_muon.math.normuon import normalize_neurons_


@pytest.mark.parametrize(("rows", "cols"), [(13, 7), (7, 13), (1, 9), (9, 1)])
def test_normuon_evens_out_rows_and_keeps_the_norm(rows: int, cols: int) -> None:
    torch.manual_seed(0)
    update = torch.randn(rows, cols) * torch.logspace(-2, 1, rows)[:, None]
    moment = torch.zeros(rows)
    found = normalize_neurons_(update.bfloat16(), moment, beta2=0.9)
    torch.testing.assert_close(moment, 0.1 * update.bfloat16().float().square().mean(1))
    torch.testing.assert_close(found.norm(), torch.tensor(math.sqrt(min(rows, cols))))
    # After one step each row is divided by its own norm.
    torch.testing.assert_close(found.norm(dim=1), torch.full((rows,), math.sqrt(min(rows, cols) / rows)))


def test_zeros_stay_zeros() -> None:
    moment = torch.zeros(3)
    found = normalize_neurons_(torch.zeros(3, 4), moment, beta2=0.9)
    assert not found.any() and not moment.any()
