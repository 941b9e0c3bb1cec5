"""Buckets, and hooks that tell when gradients are there."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from lightning_muon.grad_sync.reducer import Arrivals, make_buckets, watch_gradients


def _indices(parameters: list[Tensor], bucket_bytes: int) -> list[list[int]]:
    positions = {parameter: index for index, parameter in enumerate(parameters)}
    return [[positions[parameter] for parameter in bucket] for bucket in make_buckets(parameters, bucket_bytes)]


@pytest.mark.parametrize(
    ("parameters", "bucket_bytes", "expected"),
    [
        ([torch.zeros(10) for _ in range(5)], 80, [[4, 3], [2, 1], [0]]),
        ([torch.zeros(2), torch.zeros(100), torch.zeros(2), torch.zeros(2)], 16, [[3, 2], [1], [0]]),
        (
            [torch.zeros(2), torch.zeros(2).bfloat16(), torch.zeros(2), torch.zeros(2, device="meta")],
            1000,
            [[3], [1], [2, 0]],
        ),
        ([torch.zeros(()), torch.zeros(0, 5), torch.zeros(3)], 16, [[2, 1, 0]]),
        ([], 16, []),
    ],
    ids=["from the last backwards", "a large one by itself", "by dtype and device", "empty ones", "none"],
)
def test_buckets(parameters: list[Tensor], bucket_bytes: int, expected: list[list[int]]) -> None:
    assert _indices(parameters, bucket_bytes) == expected


def test_a_full_bucket_is_not_exceeded() -> None:
    sizes = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    parameters = [torch.zeros(size) for size in sizes]
    buckets = make_buckets(parameters, 40)
    assert [parameter for bucket in buckets for parameter in bucket] == parameters[::-1]
    filled = [sum(parameter.nbytes for parameter in bucket) for bucket in buckets]
    assert max(filled) <= 40
    assert all(size + then[0].nbytes > 40 for size, then in zip(filled, buckets[1:], strict=False))


class _Owner:
    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.seen: list[tuple[int, ...]] = []
        self.close = watch_gradients(self, net.parameters(), _Owner.arrived)

    def arrived(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.seen.append(tuple(parameter.shape))


def _backward(net: nn.Module) -> None:
    net(torch.ones(1, 2)).sum().backward()


def test_the_number_of_calls_is_learnt_from_the_step_before() -> None:
    arrivals = Arrivals()
    assert [arrivals.add(), arrivals.add()] == [True, False]
    arrivals.begin_step()
    assert [arrivals.add(), arrivals.add()] == [False, True]
    arrivals.begin_step()
    arrivals.begin_step()  # A step without any backward pass.
    assert arrivals.add()


def test_gradients_are_told_of_until_the_hooks_go() -> None:
    net = nn.Linear(2, 3)
    owner = _Owner(net)
    _backward(net)
    assert sorted(owner.seen) == [(3,), (3, 2)]
    owner.close()
    _backward(net)
    assert len(owner.seen) == 2


def test_a_frozen_parameter_is_watched_once_it_trains() -> None:
    net = nn.Linear(2, 3)
    net.bias.requires_grad_(False)
    owner = _Owner(net)
    _backward(net)
    assert owner.seen == [(3, 2)] and not net.bias.requires_grad
    net.bias.requires_grad_(True)
    _backward(net)
    assert sorted(owner.seen) == [(3,), (3, 2), (3, 2)]


def test_the_hooks_do_not_keep_their_owner_or_the_model() -> None:
    net = nn.Linear(2, 3)
    references = weakref.ref(_Owner(net)), weakref.ref(net)
    gc.collect()
    assert references[0]() is None
    _backward(net)
    owner = _Owner(net)
    del net, owner
    gc.collect()
    assert references[1]() is None
