"""Checksums change with any bit and any place."""

import pytest
import torch

from lightning_muon.math.checksum import checksums


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_any_changed_bit_changes_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(7, 5).to(dtype)
    for index in range(35):
        other = weight.clone()
        other.view(-1).view(torch.uint8)[index * dtype.itemsize] ^= 1
        assert not torch.equal(checksums([other]), checksums([weight]))
    assert torch.equal(checksums([weight.clone()]), checksums([weight]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_that_have_changed_places_and_signs_are_noticed(dtype: torch.dtype) -> None:
    weight = torch.arange(1.0, 13.0).view(4, 3).to(dtype)
    swapped = weight[[1, 0, 2, 3]]
    flipped = weight * torch.tensor([-1.0, 1.0, 1.0]).to(dtype)
    neighbours = weight.view(-1)[[0, 1, 3, 2, *range(4, 12)]].view(4, 3)
    sums = {int(checksums([w])[0]) for w in (weight, swapped, flipped, neighbours)}
    assert len(sums) == 4
    assert not torch.equal(checksums([torch.zeros(1)]), checksums([-torch.zeros(1)]))
    blocks = torch.arange(3 * 8 * 2**16 + 5).to(torch.uint8).view(-1)
    assert not torch.equal(checksums([blocks]), checksums([torch.cat([blocks[8 * 2**16 :], blocks[: 8 * 2**16]])]))
