"""Tensors as bytes."""

from __future__ import annotations

import pytest
import torch

from lightning_muon.flexdemo.wire import as_bytes, from_bytes


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_bytes_anywhere_in_a_message_come_back_as_they_were(dtype: torch.dtype, offset: int) -> None:
    tensor = torch.randint(-100, 100, (13, 7)).to(dtype)
    packed = as_bytes(tensor)
    assert packed.shape == (91 * dtype.itemsize,) and packed.dtype == torch.uint8
    message = torch.cat([torch.zeros(offset, dtype=torch.uint8), packed])
    assert torch.equal(from_bytes(message[offset:], dtype), tensor.view(-1))
