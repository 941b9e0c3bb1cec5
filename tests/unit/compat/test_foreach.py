"""The operations on lists of tensors do to each tensor what their names say."""

from __future__ import annotations

import torch

from lightning_muon.compat import foreach


def test_changes_in_place() -> None:
    tensors = [torch.tensor([1.0, -3.0]), torch.tensor(5.0)]
    foreach.add_(tensors, [torch.ones(2), torch.tensor(2.0)], alpha=2)
    foreach.mul_(tensors, 2)
    assert [each.tolist() for each in tensors] == [[6, -2], 18]
    foreach.clamp_min_(tensors, -1)
    foreach.clamp_max_(tensors, 7)
    assert [each.tolist() for each in tensors] == [[6, -1], 7]
    foreach.lerp_(tensors, [torch.zeros(2), torch.tensor(1.0)], 0.5)
    assert [each.tolist() for each in tensors] == [[3, -0.5], 4]
    foreach.copy_(tensors, [torch.zeros(2, dtype=torch.bfloat16), torch.tensor(9)])
    assert [each.tolist() for each in tensors] == [[0, 0], 9]


def test_new_tensors() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor(-2.0)]
    assert [each.item() for each in foreach.norm(tensors, 2, dtype=torch.float32)] == [5, 2]
    assert [each.tolist() for each in foreach.sub(tensors, tensors)] == [[0, 0], 0]
    assert [each.tolist() for each in foreach.lerp(tensors, [torch.zeros(2), torch.tensor(0.0)], 0.5)] == [[1.5, 2], -1]
