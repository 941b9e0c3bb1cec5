"""Ranges that torch.profiler sees of the step of a pipeline, as docs/monitor.md names them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from lightning_muon import MuonConfig
from tests.distributed.pipeline.models import batch_of, causal_lm, chain, start, take_step
from tests.distributed.test_profiler_ranges import Event, ranges_of
from tests.support.processes import ProcessPool


def _profiled(options: dict[str, Any], *, tied: bool, clips: bool) -> list[Event]:
    """Ranges of the second step."""
    net: Any = causal_lm("llama", tied=True) if tied else chain(6)
    chosen = {"optimizer": MuonConfig(), "pipeline_microbatches": 8, **options}
    engine, optimizer = start(net, partial(torch.optim.AdamW, lr=0.01), **chosen)
    for step in range(2):
        optimizer.zero_grad()
        rank, size = engine.meshes.data_rank, engine.meshes.num_data_ranks
        batch = {key: value[rank::size] for key, value in batch_of(16, 5, seed=step).items()}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.run_pipeline(batch)
            if clips:
                engine.clip_by_norm(list(net.parameters()), 0.1)
            engine.step(optimizer, take_step)
    engine.end_training()
    engine.close()
    return ranges_of(profile)


@pytest.mark.parametrize(
    ("options", "tied", "clips", "passes", "others"),
    [
        ({}, False, False, {"F": 8, "B": 8}, {"momentum", "newton_schulz", "update", "adamw"}),
        ({"pipeline_schedule": "zb_v"}, False, True, {"F": 16, "I": 16, "W": 16}, {"gradient_norm", "newton_schulz"}),
        (
            {"pipeline_schedule": "zb_h1", "optimizer": "keep"}, True, True,
            {"F": 8, "I": 8, "W": 8}, {"tied", "gradient_norm"},
        ),
        ({"shard_size": 2}, False, True, {"F": 8, "B": 8}, {"unshard", "reduce_grad", "gather", "scatter"}),
    ],
)  # fmt: skip
def test_ranges_are_the_ops_of_the_rank(
    gloo: ProcessPool, options: dict[str, Any], tied: bool, clips: bool, passes: dict[str, int], others: set[str]
) -> None:
    world_size = 2 * options.get("shard_size", 1)
    for ranges in gloo.run(_profiled, options, tied=tied, clips=clips, world_size=world_size):
        counts = Counter(name.partition("[")[0] for name, *_ in ranges)
        # The first stage needs no gradient of its inputs: its backward is one pass.
        assert {kind: counts[kind] for kind in passes} == passes
        assert others <= counts.keys() and (counts["gradient_norm"] == 1) == clips
        names = [name for name, *_ in ranges]
        last = max(index for index, name in enumerate(names) if name[:2] in ("F[", "B[", "I[", "W["))
        assert not clips or names.index("gradient_norm[all]") > last
        waits = [each for each in ranges if each[0].startswith("wait[") and each[0] != "wait[batch]"]
        assert waits, "a rank of a pipeline waits for messages"
        ops = [each for each in ranges if not each[0].startswith(("wait", "agree"))]
        assert all(any(low <= begin and end <= high for _, low, high in ops) for _, begin, end in waits)
