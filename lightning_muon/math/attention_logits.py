"""The largest attention logit of each head, and the QK-Clip factor that follows from it."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

with suppress(ImportError):  # The shapes in annotations are read by tests and type checkers alone.
    from jaxtyping import Float

# Logits that are in memory at once, 64 MiB in bfloat16.
_BLOCK = 1 << 25
# An additive mask of at most this hides a key: exp(-1e4) is 0 in every dtype.
_HIDDEN = -1e4


@torch.no_grad()
def max_logits(
    query: Float[Tensor, "batch heads queries size"],
    key: Float[Tensor, "batch key_heads keys size"],
    *,
    scale: float,
    mask: Tensor | None = None,
    is_causal: bool = False,
    block: int = _BLOCK,
) -> Float[Tensor, " heads"]:
    """The largest ``scale * q . k`` of each query head, over the batch and all pairs that the mask lets see each other.

    Products are in the dtype of ``query``, the result in float32; -inf for a head without such a pair. Takes
    ``batch * heads * queries * keys * size`` multiply-adds, half of them with ``is_causal``.

    Args:
        query: With the rotary embedding applied, if there is one.
        key: Its head ``i`` is that of the query heads ``i * heads / key_heads`` and following.
        scale: Positive; usually ``1 / sqrt(size)``.
        mask: That of ``scaled_dot_product_attention``, which broadcasts to (batch, heads, queries, keys): true where a
            key is seen, or what is added to logits. It hides keys; a bias that it adds is no part of the result.
        is_causal: Query ``i`` sees the keys up to ``i``.
        block: Logits that are computed at once.
    """
    batch, num_heads, num_queries, size = query.shape
    num_key_heads, num_keys = key.shape[1], key.shape[2]
    group = num_heads // num_key_heads
    found = torch.full((num_heads,), -math.inf, device=query.device)
    if 0 in (batch, num_queries, num_keys):
        return found
    by_group = (batch, num_key_heads, group, num_queries)
    grouped, keys = query.reshape(*by_group, size), key.to(query.dtype).mT
    if mask is not None:
        mask = mask.expand(batch, num_heads, num_queries, num_keys).view(*by_group, num_keys)
    step = max(1, block // (batch * num_heads * num_keys))
    with torch.autocast(query.device.type, enabled=False):
        for start in range(0, num_queries, step):
            stop = min(start + step, num_queries)
            last = min(stop, num_keys) if is_causal else num_keys
            rows = grouped[..., start:stop, :].reshape(batch, num_key_heads, -1, size)
            logits = (rows @ keys[..., :last]).view(batch, num_key_heads, group, stop - start, last)
            if is_causal:
                places = torch.arange(last, device=query.device)
                logits.masked_fill_(places > torch.arange(start, stop, device=query.device)[:, None], -math.inf)
            if mask is not None:
                part = mask[..., start:stop, :last]
                logits.masked_fill_(~part if part.dtype == torch.bool else part <= _HIDDEN, -math.inf)
            found = torch.maximum(found, logits.amax((0, 3, 4)).flatten().float())
    return found * scale


def clip_factors(maxima: Float[Tensor, " heads"], threshold: float) -> Float[Tensor, " heads"]:
    """``gamma = min(1, threshold / S_max)`` of each head; 1 where ``S_max`` is NaN or infinite.

    Source: Kimi Team 2025, Kimi K2, arXiv:2507.20534, Algorithm 1.
    """
    exceeds = (maxima > threshold) & maxima.isfinite()
    return torch.where(exceeds, threshold / maxima, 1.0)
