"""Hashes of tensors, computed where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

_BLOCK = 1 << 16  # Words in a block: each is multiplied by a random number of its place, drawn once.
_PART = 8 * 256 * _BLOCK  # Bytes that are processed together.


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """The :func:`checksum` of each tensor: (number of tensors,), int64, on their device. Local."""
    found = [checksum(each) for each in tensors]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device="cpu")


@torch.no_grad()
def checksum(tensor: Tensor, level: int = 0) -> Tensor:
    """A hash, int64 on its device, that is equal for different bits in about one case in 2^60 only. Local.

    It is the sum, modulo 2^64, of all words of 8 bytes, each times a random number of its place; in large tensors, of
    the sums of blocks in the same way. ``level`` chooses the random numbers.
    """
    octets, sums = tensor.detach().contiguous().view(-1).view(torch.uint8), list[Tensor]()
    for start in range(0, max(1, octets.numel()), _PART):
        words = _padded(octets[start : start + _PART], 8).view(torch.int64)
        weights = _weights(words.device, level)
        if words.numel() > _BLOCK:
            rows = _padded(words, _BLOCK).view(-1, _BLOCK)
            sums.append((rows * weights).sum(1))
        else:
            sums.append((words * weights[: words.numel()]).sum(0, keepdim=True))
    total = torch.cat(sums)
    return total[0] if total.numel() == 1 else checksum(total, level + 1)


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(-tensor.numel() % multiple)])


@cache
def _weights(device: torch.device, level: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(level)
    drawn = torch.randint(-(1 << 62), 1 << 62, (_BLOCK,), generator=generator, device="cpu")
    return (2 * drawn + 1).to(device)  # Odd: no bit of a word is lost.
