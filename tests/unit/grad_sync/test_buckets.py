"""Which gradients travel together."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lightning_muon.grad_sync.reducer import make_buckets, num_bytes


def _indices(parameters: list[Tensor], bucket_bytes: int) -> list[list[int]]:
    positions = {parameter: index for index, parameter in enumerate(parameters)}
    buckets = make_buckets(parameters, bucket_bytes=bucket_bytes)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    return [[positions[parameter] for parameter in bucket.parameters] for bucket in buckets]


def test_buckets_are_filled_from_the_last_parameter_backwards() -> None:
    assert _indices([torch.zeros(10) for _ in range(5)], 80) == [[4, 3], [2, 1], [0]]


def test_a_parameter_that_exceeds_the_bound_has_a_bucket_of_its_own() -> None:
    assert _indices([torch.zeros(2), torch.zeros(100), torch.zeros(2), torch.zeros(2)], 16) == [[3, 2], [1], [0]]


def test_a_full_bucket_is_not_exceeded() -> None:
    sizes = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    parameters = [torch.zeros(size) for size in sizes]
    buckets = make_buckets(parameters, bucket_bytes=40)
    assert [p for bucket in buckets for p in bucket.parameters] == parameters[::-1]
    assert all(sum(map(num_bytes, bucket.parameters)) <= 40 for bucket in buckets)
    assert all(
        sum(map(num_bytes, first.parameters)) + num_bytes(then.parameters[0]) > 40 for first, then in pairwise(buckets)
    )


def test_dtypes_and_devices_do_not_mix_and_a_bucket_is_launched_when_its_last_parameter_is_due() -> None:
    half = torch.bfloat16
    parameters = [torch.zeros(2), torch.zeros(2, dtype=half), torch.zeros(2), torch.zeros(2, device="meta")]
    assert _indices(parameters, 1000) == [[3], [1], [2, 0]]


def test_empty_and_zero_dimensional_parameters_have_a_place() -> None:
    assert _indices([torch.zeros(()), torch.zeros(0, 5), torch.zeros(3)], 16) == [[2, 1, 0]]
    assert make_buckets([]) == []


def test_a_bound_below_one_byte_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bucket_bytes.*0"):
        make_buckets([torch.zeros(1)], bucket_bytes=0)
