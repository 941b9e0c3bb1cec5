"""Every mode gives the weights of one process with the whole batch."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.schedule.cost import PRESETS
from tests.distributed.sharding.modes.training import Run, branch_by_rank, largest_difference, train, train_alone
from tests.support.processes import ProcessPool

RUNS = {
    "plain": Run(),
    "accumulated": Run(accumulate=3),
    "clipped": Run(max_norm=0.3),
    "branches that differ by rank": Run(branch_of=branch_by_rank, accumulate=2, max_norm=0.5),
}
# fsdp: parameters that only some ranks use are tested in tests/distributed/sharding/test_gradients.py.
CASES = [
    (mode, shape, name) for mode in ("zero2", "ddp") for shape in ((1,), (2,), (3,), (4,), (2, 2)) for name in RUNS
] + [
    ("fsdp", shape, name) for shape in ((1,), (2,), (3,), (4,), (2, 2)) for name in ("plain", "accumulated", "clipped")
]


@pytest.mark.parametrize(("mode", "shape", "run"), CASES, ids=str)
def test_weights_are_those_of_one_process(gloo: ProcessPool, mode: str, shape: tuple[int, ...], run: str) -> None:
    size = math.prod(shape)
    expected = train_alone(RUNS[run], size)
    for weights in gloo.run(train, mode, shape, RUNS[run], {"bucket_bytes": 600}, world_size=size):
        difference, name = largest_difference(weights, expected)
        # Sums of float32 in another order; Newton-Schulz makes more of it where a gradient has small singular values.
        assert difference < 1e-6, name


def _train_on_nodes(run: Run) -> dict[str, Tensor]:
    """On two nodes of two ranks, where nodes sum first as launches and latencies cost nothing."""
    free = replace(PRESETS["h100"], op_seconds=0.0, latency_seconds=(0.0,))
    with mock.patch.dict(os.environ, GROUP_RANK=str(dist.get_rank() // 2)), mock.patch.dict(PRESETS, h100=free):
        return train("zero2", (4,), run, {"bucket_bytes": 600})


@pytest.mark.parametrize("run", RUNS)
def test_weights_of_zero2_on_two_nodes_are_those_of_one_process_and_equal_on_all_ranks(
    gloo: ProcessPool, run: str
) -> None:
    expected = train_alone(RUNS[run], 4)
    first, *others = gloo.run(_train_on_nodes, RUNS[run])
    difference, name = largest_difference(first, expected)
    assert difference < 1e-6, name
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("mode", ["zero2", "ddp"])
def test_replicas_have_the_same_bits(gloo: ProcessPool, mode: str) -> None:
    first, *others = gloo.run(train, mode, (2, 2), RUNS["accumulated"], {"bucket_bytes": 600})
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
