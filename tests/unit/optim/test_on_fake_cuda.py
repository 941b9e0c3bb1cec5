"""Steps on fake CUDA devices: no race, no memory that is used again too early, and the host waits once in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_muon import DiLoCo, Full, Striding
from lightning_muon.comm.host_copy import start_reading
from lightning_muon.comm.mesh import ALONE
from lightning_muon.grad_sync.finite import find_nonfinite
from lightning_muon.grad_sync.token_count import TokenCount
from tests.support.fake_cuda import Tracker, allow_fake_cuda, why_not, world
from tests.support.fake_device import Simulation
from tests.support.fake_training import run_fsdp, run_flexdemo, run_zero2, shapes_of

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

# The only places where the host may wait for the device, each once in a step.
ALLOWED = {"event.synchronize @ comm/host_copy.py read"}
NUM_RANKS = 8
SCENARIOS: dict[str, Callable[[], tuple[Simulation, Any]]] = {
    "fsdp, backward": lambda: run_fsdp(SMALL, NUM_RANKS, overlap="backward"),
    "fsdp, step": lambda: run_fsdp(SMALL, NUM_RANKS, overlap="step"),
    "fsdp, off": lambda: run_fsdp(SMALL, NUM_RANKS, overlap="off"),
    "fsdp, backward, clip": lambda: run_fsdp(SMALL, NUM_RANKS, overlap="backward", clip=True),
    "fsdp, backward, lr on the device": lambda: run_fsdp(SMALL, NUM_RANKS, overlap="backward", lr_on_device=True),
    "fsdp, bfloat16": lambda: run_fsdp(SMALL, NUM_RANKS, overlap="backward", dtype=torch.bfloat16),
    "hsdp, shared owners": lambda: run_fsdp(SMALL, NUM_RANKS, replicas=2, dedupe="always", overlap="backward"),
    "hsdp, repeated": lambda: run_fsdp(SMALL, NUM_RANKS, replicas=2, dedupe="never", overlap="backward"),
    "zero2": lambda: run_zero2(SMALL, NUM_RANKS),
    "zero2, replicas": lambda: run_zero2(SMALL, NUM_RANKS, replicas=2),
    "zero2, clip": lambda: run_zero2(SMALL, NUM_RANKS, clip=True),
    "ddp": lambda: run_zero2(SMALL, NUM_RANKS, sharding="ddp"),
    "ddp, clip": lambda: run_zero2(SMALL, NUM_RANKS, replicas=2, sharding="ddp", clip=True),
    "FlexDeMo sgd": lambda: run_flexdemo(SMALL, NUM_RANKS, base="sgd", overlap="backward"),
    "FlexDeMo muon": lambda: run_flexdemo(SMALL, NUM_RANKS, base="muon", overlap="backward"),
    "FlexDeMo late": lambda: run_flexdemo(SMALL, NUM_RANKS, base="sgd", overlap="backward", delay=1),
    "FlexDeMo sums": lambda: run_flexdemo(SMALL, NUM_RANKS, base="adamw", replicator=Full()),
    "FlexDeMo sums, unfinished": lambda: run_flexdemo(
        SMALL, NUM_RANKS, replicas=4, base="muon", replicator=Full(), completed=False
    ),
    "FlexDeMo late sums": lambda: run_flexdemo(
        SMALL, NUM_RANKS, replicas=4, replicator=Striding(rate=0.25), value_format="int8", delay=1
    ),
    "FlexDeMo signs": lambda: run_flexdemo(SMALL, NUM_RANKS, replicas=8, base="sgd", value_format="sign"),
    "DiLoCo": lambda: run_flexdemo(SMALL, NUM_RANKS, replicator=DiLoCo(period=2), steps=4),
    "DiLoCo, overlap": lambda: run_flexdemo(SMALL, NUM_RANKS, replicator=DiLoCo(period=2, overlap=True), steps=6),
}
SMALL = shapes_of("small")


@pytest.fixture(scope="module", autouse=True)
def _guard() -> None:
    allow_fake_cuda()


@pytest.fixture
def device() -> Iterator[Simulation]:
    with world(1) as simulation, Tracker():
        simulation.on = True
        yield simulation


def _places(simulation: Simulation) -> set[str]:
    """Where the host has waited, without line numbers."""
    return {" ".join(part.partition(":")[0] if "/" in part else part for part in what.split()) for what in simulation.syncs}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_race_and_one_wait_in_a_step(scenario: str) -> None:
    simulation, _ = SCENARIOS[scenario]()

    assert not simulation.found
    assert {what.rpartition(":")[0] for what in simulation.syncs} == {"event.synchronize @ comm/host_copy.py"}
    assert simulation.syncs.total() == simulation.num_steps
