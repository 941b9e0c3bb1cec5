"""Steps on fake CUDA devices: no race, no memory that is used again too early, and the host waits once in a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_muon import DiLoCo, Full, ParallelMuon, StepMonitor, Striding
from lightning_muon.comm.collectives import ALONE
from lightning_muon.sharding.tokens import TokenCount
from tests.support.fake_cuda import Tracker, allow_fake_cuda, why_not, world
from tests.support.fake_device import Event, Simulation
from tests.support.fake_training import run_flexdemo, run_fsdp, run_zero2

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

# The only place where the host may wait for the device, once in a step.
ALLOWED = {"event.synchronize @ comm/collectives.py read"}
NUM_RANKS = 8
SCENARIOS: dict[str, Callable[[], Simulation]] = {
    "fsdp": lambda: run_fsdp(NUM_RANKS),
    "fsdp, clip": lambda: run_fsdp(NUM_RANKS, clip=True),
    "fsdp, bfloat16": lambda: run_fsdp(NUM_RANKS, dtype=torch.bfloat16),
    "fsdp, NorMuon": lambda: run_fsdp(NUM_RANKS, normuon=True),
    "hsdp, NorMuon": lambda: run_fsdp(NUM_RANKS, replicas=2, dedupe="always", normuon=True),
    "hsdp, shared owners": lambda: run_fsdp(NUM_RANKS, replicas=2, dedupe="always"),
    "fsdp, a bucket at a time": lambda: run_fsdp(2, look_ahead=1, bucket_bytes=1),
    "fsdp, clip, small buckets": lambda: run_fsdp(NUM_RANKS, clip=True, bucket_bytes=1),
    "zero2, replicas": lambda: run_zero2(NUM_RANKS, replicas=2, sharding="zero2"),
    "ddp, clip": lambda: run_zero2(NUM_RANKS, replicas=2, sharding="ddp"),
    "FlexDeMo sgd": lambda: run_flexdemo(NUM_RANKS, base="sgd"),
    "FlexDeMo muon": lambda: run_flexdemo(NUM_RANKS, replicas=8),
    "FlexDeMo sums": lambda: run_flexdemo(NUM_RANKS, replicas=4, replicator=Full()),
    "FlexDeMo strides": lambda: run_flexdemo(NUM_RANKS, replicas=4, base="sgd", replicator=Striding(rate=0.25)),
    "DiLoCo": lambda: run_flexdemo(NUM_RANKS, base="sgd", replicator=DiLoCo(period=2), steps=4),
}


@pytest.fixture(scope="module", autouse=True)
def _guard() -> None:
    allow_fake_cuda()


@pytest.fixture
def device() -> Iterator[Simulation]:
    with world(1) as simulation, Tracker():
        simulation.begin_step(on=True)
        yield simulation


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_race_and_one_wait_in_a_step(scenario: str) -> None:
    simulation = SCENARIOS[scenario]()

    assert not simulation.found
    assert _places(simulation) <= ALLOWED
    assert simulation.syncs.total() == simulation.num_steps
    assert {stream.priority for stream in simulation.streams if stream.id.startswith("stream")} <= {-1}


def test_a_token_count_is_on_its_way_as_soon_as_it_is_reported(device: Simulation) -> None:
    count = TokenCount(ALONE)
    count.begin_micro_batch()
    count.report(torch.zeros((), dtype=torch.int64, device="cuda"))
    reported = dict(device.current.clock)
    torch.zeros(4, device="cuda").add_(1)  # the forward pass

    assert count.total() == 0
    assert _places(device) <= ALLOWED and device.syncs.total() == 1
    assert device.host == reported


def test_the_checker_finds_every_wait(device: Simulation) -> None:
    tensor = torch.zeros(4, device="cuda")
    waits: list[Callable[[], object]] = [
        tensor.tolist,
        lambda: bool(tensor.sum() > 0),
        tensor.cpu,
        lambda: torch.equal(tensor, tensor),
        lambda: tensor.copy_(torch.zeros(4)),
        lambda: torch.zeros(4).copy_(tensor, non_blocking=True),
        lambda: tensor.__setitem__([0, 2], torch.zeros(2, device="cuda")),
        lambda: tensor.__setitem__(tensor > 0, torch.zeros(4, device="cuda")),
        torch.cuda.synchronize,
        lambda: torch.cuda.current_stream().synchronize(),
    ]
    for number, wait in enumerate(waits, 1):
        wait()
        assert device.syncs.total() == number


@pytest.mark.parametrize("is_freed", [True, False])
@pytest.mark.parametrize("is_ordered", [True, False])
def test_the_checker_finds_races_and_memory_used_too_early(
    device: Simulation, is_ordered: bool, is_freed: bool
) -> None:
    tensor, stream = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tensor.add_(1)
    if is_ordered:
        torch.cuda.current_stream().wait_stream(stream)
    if is_freed:
        del tensor
        torch.zeros(4, device="cuda")
    else:
        tensor.mul(2)
    assert [what.split()[0] for what in device.found] == ([] if is_ordered else ["FREE" if is_freed else "RACE"])


def _places(simulation: Simulation) -> set[str]:
    """Where the host has waited, without the numbers of lines."""
    return {re.sub(r":\d+", "", what) for what in simulation.syncs}


def test_a_monitor_lets_the_host_wait_in_measured_steps_alone(device: Simulation) -> None:
    parameter = nn.Parameter(torch.zeros(4, 6, device="cuda"))
    optimizer = ParallelMuon([parameter], algorithm="muon", error_if_nonfinite=False)
    monitor = StepMonitor(optimizer, every_n_steps=3)
    with mock.patch.object(Event, "elapsed_time", create=True, return_value=1.0):
        for step in range(1, 7):
            before = device.syncs.total()
            parameter.grad = torch.zeros(4, 6, device="cuda")
            optimizer.step()
            # A step that comes before a measured one ends with the begin of the recording.
            assert (device.syncs.total() > before) == (step % 3 != 1)
            assert bool(monitor.take()) == (step % 3 == 0)
    assert not device.found
