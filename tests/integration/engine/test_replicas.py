"""A bit that changes on one rank only is named on all ranks; what has no copy, and the option off, cost nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.silent_corruption import SETTINGS, flip, start, step
from lightning_muon import MuonConfig
from lightning_muon.engine import replicas
from lightning_muon.optim.matrix_step import BatchSample
from lightning_muon.optim.transfer import Transfer
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
        ("ddp, 3 ranks", "weights", r"differs after step 4: 11.weight \(on rank 2\)"),
        ("fsdp, 2 replicas x 2 shards", "state", r"exp_avg_sq of 5.bias \(between ranks 0, 2\)"),
        ("zero2, 2 replicas x 2 shards", "state", r"exp_avg_sq of 7.bias \(between ranks 0, 2\)"),
        ("FlexDeMo, 3 nodes", "weights", r"11.weight \(on rank 2\)"),
    ],
)
def test_a_flipped_bit_is_named_on_all_ranks(gloo: ProcessPool, setting: str, kind: str, match: str) -> None:
    size = SETTINGS[setting].num_ranks
    gloo.expect_error_on_all_ranks(_flipped, setting, kind, 2, match=match, exception=RuntimeError, world_size=size)


def _flipped_update(side: int) -> list[tuple[str, str]]:
    """For each mode with owners what rank 1 has changed, and the error: the least bit of one of its results."""
    outcome: list[tuple[str, str]] = []
    pack_updates, (muon, size) = Transfer.pack_updates, (MuonConfig(dedupe="always"), dist.get_world_size())
    for options in ({}, {"replicate_size": size}, {"sharding": "zero2"}, {"sharding": "ddp"}):
        name, message = "", ""

        def pack_wrong(transfer: Transfer, updates: Mapping[Any, Tensor]) -> None:
            nonlocal name
            of_side = [job for job, update in updates.items() if min(update.shape) == side]
            if dist.get_rank() == 1 and of_side:
                name = of_side[0].matrix.name
                updates[of_side[0]][1, 2].view({2: torch.int16, 4: torch.int32}[updates[of_side[0]].itemsize]).add_(1)
            pack_updates(transfer, updates)

        engine = start({"optimizer": muon, **options}, every=1)
        with mock.patch.object(Transfer, "pack_updates", pack_wrong):
            # Each check draws one of at most 9 matrices.
            for number in range(200):
                try:
                    step(engine, number)
                except RuntimeError as error:
                    message = str(error)
                    break
        outcome.append((name, message))
    return outcome


@pytest.mark.parametrize(("world_size", "side"), [(2, 32), (3, 8), (3, 32)])
def test_a_flipped_bit_of_an_update_is_named_with_its_owner(gloo: ProcessPool, world_size: int, side: int) -> None:
    """Matrices with a side of 32 are orthogonalized in batches, the others one by one."""
    of_ranks = gloo.run(_flipped_update, side, world_size=world_size)
    for of_mode in zip(*of_ranks, strict=True):
        name = of_mode[1][0]
        (message,) = {message for _, message in of_mode}
        assert f": Newton-Schulz of {name} (between its owner, rank 1, and rank {2 % world_size})." in message


def _undisturbed(setting: str, every: int) -> tuple[int, int]:
    """How many sums of bits a training of four steps has computed, and how often it has kept a batch."""
    with (
        mock.patch.object(replicas, "checksums", side_effect=replicas.checksums) as called,
        mock.patch.object(replicas, "BatchSample", side_effect=BatchSample) as kept,
    ):
        engine = start(SETTINGS[setting].options, every=every)
        for number in range(4):
            step(engine, number)
    return called.call_count, kept.call_count


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_replicas_are_no_error(gloo: ProcessPool, setting: str) -> None:
    for num_sums, num_kept in gloo.run(_undisturbed, setting, 2, world_size=SETTINGS[setting].num_ranks):
        assert num_sums and num_kept == 2


def test_nothing_is_compared_unless_it_is_asked_for(gloo: ProcessPool) -> None:
    assert gloo.run(_undisturbed, "ddp, 3 ranks", 0, world_size=3) == 3 * [(0, 0)]
