"""The largest attention logits in blocks are those of the whole product."""

import math

import pytest
import torch
from torch import Tensor

from lightning_muon.math.attention_logits import clip_factors, max_logits


def _whole(query: Tensor, key: Tensor, *, scale: float, hidden: Tensor) -> Tensor:
    """All logits at once; ``hidden`` is (batch, heads, queries, keys)."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = torch.einsum("bhqd,bhkd->bhqk", query, key) * scale
    return logits.masked_fill(hidden, -math.inf).amax((0, 2, 3))


@pytest.mark.parametrize("key_heads", [6, 2, 1])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "added", "padding"])
@pytest.mark.parametrize("block", [1, 500, 1 << 20])
def test_blocks_give_the_maximum_of_the_whole_product(key_heads: int, kind: str, block: int) -> None:
    generator = torch.Generator().manual_seed(key_heads)
    queries, keys = (7, 5) if kind == "none" else (5, 7)
    query = torch.randn(3, 6, queries, 13, generator=generator)
    key = torch.randn(3, key_heads, keys, 13, generator=generator)
    hidden = torch.rand(3, 6, queries, keys, generator=generator) < 0.6
    mask = None
    if kind == "none":
        hidden = torch.zeros_like(hidden)
    elif kind == "causal":
        hidden = torch.ones(queries, keys).triu(1).bool().expand(3, 6, -1, -1)
    elif kind == "bool":
        mask = ~hidden
    elif kind == "added":
        bias = torch.randn(1, 6, queries, keys, generator=generator)  # Of a relative position; it does not count.
        mask = torch.where(hidden, torch.finfo(torch.float32).min, bias)
    else:
        mask = ~hidden[:, :1, :1]
        hidden = ~mask.expand(3, 6, queries, keys)
    found = max_logits(query, key, scale=0.3, mask=mask, is_causal=kind == "causal", block=block)
    # Other blocks may add up the products in another order.
    torch.testing.assert_close(found, _whole(query, key, scale=0.3, hidden=hidden), rtol=1e-6, atol=1e-6)


def test_what_sees_no_key_has_no_logit() -> None:
    query, key = torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4, 5)
    mask = torch.ones(1, 3, 1, 1, dtype=torch.bool)
    mask[:, 1] = False
    assert max_logits(query, key, scale=1.0, mask=mask).tolist() == [5.0, -math.inf, 5.0]
    assert max_logits(query[:0], key[:0], scale=1.0).tolist() == [-math.inf] * 3


def test_factors_bring_logits_to_the_threshold() -> None:
    maxima = torch.tensor([-math.inf, -3.0, 0.0, 10.0, 40.0, math.inf, math.nan])
    assert clip_factors(maxima, 10.0).tolist() == [1, 1, 1, 1, 0.25, 1, 1]
    assert clip_factors(maxima, math.inf).tolist() == [1] * 7
