"""The two learning-rate rules against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_muon.math.lr_scale import lr_scale


@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4)], ids=str)
def test_the_rule_is_that_of_torch(shape: tuple[int, int], adjust_lr_fn: str) -> None:
    torch.manual_seed(0)
    grad = torch.randn(shape)
    moved: list[float] = []
    for name in (None, adjust_lr_fn):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = grad
        torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, adjust_lr_fn=name).step()
        moved.append(float(weight.detach().norm()))
    base = lr_scale(*shape, "original")
    assert moved[1] / moved[0] == pytest.approx(lr_scale(*shape, adjust_lr_fn) / base, rel=1e-6)


def test_match_rms_adamw_is_written_out_for_one_shape() -> None:
    assert lr_scale(100, 25, "match_rms_adamw") == pytest.approx(2.0)
    assert lr_scale(100, 25, "original") == pytest.approx(2.0)
    assert lr_scale(25, 100, "original") == 1.0
