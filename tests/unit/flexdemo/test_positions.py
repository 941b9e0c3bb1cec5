"""Positions as bytes."""

from __future__ import annotations

import pytest
import torch

from lightning_muon.flexdemo.wire import pack_positions, position_bytes, unpack_positions


@pytest.mark.parametrize(
    ("block_numel", "num_bytes"), [(1, 2), (4096, 2), (32769, 2), (65536, 2), (65537, 4), (1 << 31, 4)]
)
def test_positions_come_back_from_as_few_bytes_as_hold_them(block_numel: int, num_bytes: int) -> None:
    positions = torch.randint(block_numel, (13, 7))
    # The ends, and both sides of where 16 bits have their sign.
    positions[0] = torch.tensor([0, block_numel - 1, 32767, 32768, 65535, 65536, 1]).clamp(max=block_numel - 1)
    packed = pack_positions(positions, block_numel)
    assert position_bytes(block_numel) == num_bytes
    assert packed.shape == (91 * num_bytes,) and packed.dtype == torch.uint8
    assert torch.equal(unpack_positions(packed, 13, 7, block_numel), positions)
