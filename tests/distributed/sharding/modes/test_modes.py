"""Every mode gives the weights of one process with the whole batch."""

from __future__ import annotations

import math

import pytest
import torch

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


@pytest.mark.parametrize("mode", ["zero2", "ddp"])
def test_replicas_have_the_same_bits(gloo: ProcessPool, mode: str) -> None:
    first, *others = gloo.run(train, mode, (2, 2), RUNS["accumulated"], {"bucket_bytes": 600})
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
