"""What a message tells of the sizes of the tensors behind it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_muon.pipeline.messages import _DTYPES, Size, _decode, _encode

_SIZES = st.builds(
    Size, st.lists(st.integers(0, 2**40), max_size=4).map(tuple), st.sampled_from(_DTYPES), st.booleans()
)


@given(st.lists(_SIZES, max_size=18))
def test_sizes_arrive_as_they_were_sent(sizes: list[Size]) -> None:
    words = _encode(sizes)
    assert words.dtype == torch.int64 and words.shape == _encode([]).shape
    assert _decode(words.tolist()) == sizes


def test_too_many_tensors_for_one_message_are_named() -> None:
    with pytest.raises(ValueError, match="returns 40 tensors"):
        _encode([Size((1,), torch.float32, True)] * 40)
    with pytest.raises(ValueError, match="complex64"):
        _encode([Size((1,), torch.complex64, True)])
