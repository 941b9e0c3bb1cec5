"""What a message tells of the sizes of the tensors behind it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_muon.pipeline.messages import Size, _decode, _encode

_DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)
_SIZES = st.builds(
    Size, st.lists(st.integers(0, 2**40), max_size=4).map(tuple), st.sampled_from(_DTYPES), st.booleans()
)


@given(st.lists(_SIZES, max_size=50))
def test_sizes_arrive_as_they_were_sent(sizes: list[Size]) -> None:
    octets = _encode(sizes)
    assert octets.dtype == torch.uint8 and octets.shape == _encode([]).shape
    assert _decode(octets) == sizes


def test_too_many_tensors_for_one_message_are_named() -> None:
    with pytest.raises(ValueError, match="returns 400 tensors"):
        _encode([Size((number,), torch.float32, True) for number in range(400)])
