"""A bit that changes on one rank only is named on all ranks; what has no copy, and the option off, cost nothing."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.silent_corruption import SETTINGS, flip, start, step
from lightning_muon import MuonConfig
from lightning_muon.engine import replicas
from lightning_muon.engine.replicas import ReplicaCheck
from lightning_muon.math.methods import NewtonSchulz
from tests.support.processes import ProcessPool


def _flipped(setting: str, kind: str, rank: int) -> None:
    engine = start(SETTINGS[setting].options, every=2)
    for number in range(3):
        step(engine, number)
    if dist.get_rank() == rank:
        flip(engine, kind, random.Random(5))
    step(engine, 3)


@pytest.mark.parametrize(
    ("setting", "kind", "match"),
    [
        ("ddp, 3 ranks", "weights", r"differs after step 4: 3.bias \(on rank 2\)"),
        ("fsdp, 2 replicas x 2 shards", "state", r"exp_avg_sq of 1.bias \(between ranks 0, 2\)"),
        ("zero2, 2 replicas x 2 shards", "state", r"exp_avg_sq of 1.bias \(between ranks 0, 2\)"),
        ("FlexDeMo, 3 nodes", "weights", r"3.bias \(on rank 2\)"),
    ],
)
def test_a_flipped_bit_is_named_on_all_ranks(gloo: ProcessPool, setting: str, kind: str, match: str) -> None:
    size = SETTINGS[setting].num_ranks
    gloo.expect_error_on_all_ranks(_flipped, setting, kind, 2, match=match, exception=RuntimeError, world_size=size)


def _flipped_code(rank: int) -> None:
    engine = start({"sharding": "ddp", "optimizer": MuonConfig(momentum_dtype="int8")}, every=2)
    step(engine, 0)
    if dist.get_rank() == rank:
        stored: Any = engine.optimizers[0].state[engine.module.get_parameter("1.weight")]["momentum_buffer"]
        stored.tensors()[0].view(-1)[5] ^= 1
    step(engine, 1)


def test_a_flipped_bit_of_a_code_is_named_on_all_ranks(gloo: ProcessPool) -> None:
    match = r"1.weight \(on rank 2\)|momentum_buffer of 1.weight \(on rank 2\)"
    gloo.expect_error_on_all_ranks(_flipped_code, 2, match=match, exception=RuntimeError, world_size=3)


def _wrong_arithmetic(options: dict[str, Any]) -> None:
    """From the second step on one element that rank 1 computes is 1 % too large."""

    check, orthogonalize = ReplicaCheck._differing_arithmetic, NewtonSchulz.orthogonalize

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        result = orthogonalize(*arguments, **options)
        result[1, 2] *= 1.01
        return result

    def check_with_wrong(self: ReplicaCheck, optimizer: torch.optim.Optimizer) -> list[str]:
        with mock.patch.object(NewtonSchulz, "orthogonalize", wrong if dist.get_rank() == 1 else orthogonalize):
            return check(self, optimizer)

    engine = start(options, every=1)
    step(engine, 0)
    with mock.patch.object(ReplicaCheck, "_differing_arithmetic", check_with_wrong):
        step(engine, 1)


def test_wrong_arithmetic_is_found_where_nothing_has_a_copy(gloo: ProcessPool) -> None:
    match = r"after step 2: Newton-Schulz of \S+ \(on rank 1\)"
    gloo.expect_error_on_all_ranks(_wrong_arithmetic, {}, match=match, exception=RuntimeError, world_size=3)


def _undisturbed(setting: str, every: int) -> int:
    """How many sums of bits a training of four steps has computed."""
    with mock.patch.object(replicas, "checksums", side_effect=replicas.checksums) as called:
        engine = start(SETTINGS[setting].options, every=every)
        for number in range(4):
            step(engine, number)
    return called.call_count


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_replicas_are_no_error(gloo: ProcessPool, setting: str) -> None:
    assert all(gloo.run(_undisturbed, setting, 2, world_size=SETTINGS[setting].num_ranks))


def test_nothing_is_compared_unless_it_is_asked_for(gloo: ProcessPool) -> None:
    assert gloo.run(_undisturbed, "ddp, 3 ranks", 0, world_size=3) == [0, 0, 0]
