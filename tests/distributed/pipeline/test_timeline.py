"""Ranges that torch.profiler sees of the step of a pipeline, and that a rank steps when it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon import MuonConfig, Options, ParallelMuon
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.params.layout import local_tensor
from tests.distributed.pipeline.models import batch_of, causal_lm, chain
from tests.distributed.test_profiler_ranges import Event, ranges_of
from tests.support.processes import ProcessPool


class _Training:
    """A pipeline of this rank, after one step."""

    def __init__(self, net: nn.Module, **options: Any) -> None:
        self.net, self.num_steps = net, 0
        chosen = Options(**{"pipeline_size": 2, "optimizer": MuonConfig(muon_lr_factor=1.0), **options})
        meshes = chosen.make("cpu", num_nodes=1, num_processes=dist.get_world_size())
        self.engine = TrainingEngine(
            net, chosen, meshes, mode_options=chosen.mode_options, info=lambda _: None, warn=lambda _: None
        )
        self.engine.shard(torch.device("cpu"))
        (self.optimizer,) = self.engine.attach([torch.optim.AdamW(net.parameters(), lr=0.01)], source="the test")
        self.data = meshes.data_rank, meshes.num_data_ranks
        self.step()

    def step(self, *, clips: bool = False, before_step: Callable[[], object] = lambda: None) -> None:
        batch = batch_of(16, 5, seed=self.num_steps)
        self.num_steps += 1
        self.optimizer.zero_grad()
        self.engine.run_pipeline({key: value[self.data[0] :: self.data[1]] for key, value in batch.items()})
        if clips:
            self.engine.clip_by_norm(list(self.net.parameters()), 0.1)
        before_step()
        self.engine.step(self.optimizer, lambda optimizer: optimizer.step())

    def close(self) -> None:
        self.engine.end_training()
        self.engine.close()


def _profiled(options: dict[str, Any], *, tied: bool, clips: bool) -> tuple[list[Event], list[str]]:
    """Ranges of a step, and what this rank's lists say of it: the pipeline's, the norm, and the optimizer's."""
    training = _Training(causal_lm("llama", tied=True) if tied else chain(6), **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        training.step(clips=clips)
    assert training.engine.pipeline is not None
    listed = [op.name for op in training.engine.pipeline._programs(_MICRO["pipeline_microbatches"], True)]
    listed += ["gradient_norm[all]"] if clips else []
    if isinstance(training.optimizer, ParallelMuon):
        planned = training.optimizer._planned
        assert planned is not None
        listed += [op.name for op in planned.plan.ops]
    training.close()
    return ranges_of(profile), listed


_MICRO = {"pipeline_microbatches": 8}


@pytest.mark.parametrize(
    ("options", "tied", "clips", "world_size"),
    [
        ({}, False, False, 2),
        ({"pipeline_schedule": "zb_v"}, False, True, 2),
        ({"pipeline_schedule": "zb_h1", "optimizer": "keep"}, True, True, 2),
        ({"shard_size": 2}, False, True, 4),
    ],
)
def test_ranges_are_the_program_op_by_op(
    gloo: ProcessPool, options: dict[str, Any], tied: bool, clips: bool, world_size: int
) -> None:
    for ranges, listed in gloo.run(_profiled, {**_MICRO, **options}, tied=tied, clips=clips, world_size=world_size):
        assert [name for name, *_ in ranges if not name.startswith(("wait", "agree"))] == listed
        waits = [each for each in ranges if each[0].startswith("wait[") and each[0] != "wait[batch]"]
        assert waits, "a rank of a pipeline waits for messages"
        for _, begin, end in waits:
            assert any(low <= begin and end <= high for name, low, high in ranges if name in listed)


def _weights_after_steps(waits: bool, schedule: str) -> dict[str, Tensor]:
    training = _Training(chain(6), **_MICRO, pipeline_schedule=schedule)
    for _ in range(4):
        training.step(before_step=dist.barrier if waits else lambda: None)
    weights = {name: local_tensor(p.detach()).clone() for name, p in training.net.named_parameters()}
    training.close()
    return weights


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_weights_are_those_of_ranks_that_wait_before_they_step(gloo: ProcessPool, schedule: str) -> None:
    at_once, together = (gloo.run(_weights_after_steps, waits, schedule, world_size=2) for waits in (False, True))
    for one, other in zip(at_once, together, strict=True):
        assert one and one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())
