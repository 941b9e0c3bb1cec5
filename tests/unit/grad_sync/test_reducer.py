"""Buckets, and hooks that tell when gradients are there."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from lightning_muon.grad_sync.reducer import make_buckets, watch_gradients


@pytest.mark.parametrize(
    ("parameters", "bucket_bytes", "expected"),
    [
        ([torch.zeros(2), torch.zeros(100), torch.zeros(2), torch.zeros(2)], 16, [[3, 2], [1], [0]]),
        (
            [torch.zeros(2), torch.zeros(2).bfloat16(), torch.zeros(2), torch.zeros(2, device="meta")],
            1000,
            [[3], [1], [2, 0]],
        ),
        ([torch.zeros(()), torch.zeros(0, 5), torch.zeros(3)], 16, [[2, 1, 0]]),
        ([], 16, []),
    ],
    ids=["a large one by itself", "by dtype and device", "empty ones", "none"],
)
def test_buckets(parameters: list[Tensor], bucket_bytes: int, expected: list[list[int]]) -> None:
    positions = {parameter: index for index, parameter in enumerate(parameters)}
    found = [[positions[parameter] for parameter in bucket] for bucket in make_buckets(parameters, bucket_bytes)]
    assert found == expected


def test_a_full_bucket_is_not_exceeded() -> None:
    parameters = [torch.zeros(size) for size in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)]
    buckets = make_buckets(parameters, 40)
    assert [parameter for bucket in buckets for parameter in bucket] == parameters[::-1]
    filled = [sum(parameter.nbytes for parameter in bucket) for bucket in buckets]
    assert max(filled) <= 40
    assert all(size + then[0].nbytes > 40 for size, then in zip(filled, buckets[1:], strict=False))


class _Owner:
    def __init__(self, net: nn.Module) -> None:
        self.close = watch_gradients(self, net.parameters(), lambda owner, parameter: None)


def test_the_hooks_do_not_keep_their_owner_or_the_model() -> None:
    net = nn.Linear(2, 3)
    references = weakref.ref(_Owner(net)), weakref.ref(net)
    gc.collect()
    assert references[0]() is None
    net(torch.ones(1, 2)).sum().backward()
    owner = _Owner(net)
    del net, owner
    gc.collect()
    assert references[1]() is None
