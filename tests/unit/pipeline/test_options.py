"""What users choose of a pipeline: defaults, and values that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_muon.engine.mesh_sizes import MeshSizes
from lightning_muon.engine.options import Options
from lightning_muon.pipeline.options import PipelineOptions
from lightning_muon.schedule.pipeline import SCHEDULES
from tests.unit.schedule.pipeline.problems import BUILT_IN, STAGES_PER_RANK


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_defaults_go_with_every_schedule(name: str, num_ranks: int) -> None:
    options = PipelineOptions(pipeline_schedule=name)
    options.check_pipeline(num_ranks)
    assert options.num_microbatches(num_ranks) == 4 * num_ranks
    assert options.stages_per_rank == {"interleaved_1f1b": 2, "zb_1p": 1}.get(name, STAGES_PER_RANK.get(name))
    assert set(BUILT_IN) <= set(SCHEDULES)


def test_numbers_take_the_place_of_auto() -> None:
    options = PipelineOptions(pipeline_schedule="zb_1p", pipeline_microbatches=6, pipeline_stages_per_rank=3)
    options.check_pipeline(2)
    assert (options.num_microbatches(2), options.stages_per_rank) == (6, 3)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pipeline_schedule": "1f1p"}, "there is no schedule '1f1p'; did you mean '1f1b'"),
        ({"pipeline_schedule": "nothing of the kind"}, "there is no schedule .*; there are .*gpipe, 1f1b"),
        ({"pipeline_microbatches": 0}, "pipeline_microbatches must be 'auto' or"),
        ({"pipeline_microbatches": 2.5}, "pipeline_microbatches must be 'auto' or"),
        ({"pipeline_stages_per_rank": 0}, "pipeline_stages_per_rank must be 'auto' or"),
        ({"pipeline_stages_per_rank": 2}, "1f1b needs exactly 1 stages per rank"),
        ({"pipeline_schedule": "zb_v", "pipeline_stages_per_rank": 1}, "zb_v needs exactly 2"),
        ({"pipeline_microbatches": 1}, "1f1b needs at least 2 micro-batches"),
        ({"pipeline_schedule": "interleaved_1f1b", "pipeline_microbatches": 5}, "to be divisible by"),
        ({"pipeline_size": 0}, "pipeline_size must be"),
        ({"context_size": 2}, "pipeline_size=2 goes with replicate_size and shard_size only"),
        ({"tensor_size": 2}, "pipeline_size=2 goes with"),
        ({"tensor_parallel_size": 2}, "pipeline_size=2 goes with"),
        ({"data_parallel_size": 2}, "pipeline_size=2 goes with"),
        ({"sharding": "zero2"}, "pipeline_size=2 needs sharding='fsdp'"),
        ({"sharding": "ddp"}, "pipeline_size=2 needs sharding='fsdp'"),
        ({"save_distributed_checkpoint": False}, "does not go with pipeline_size"),
        ({"wrap_policy": ("Block",)}, "wrap_policy=.*means nothing with pipeline_size"),
        ({"reshard_after_forward": False}, "reshard_after_forward=False means nothing with pipeline_size"),
        ({"reshard_after_backward": False}, "reshard_after_backward=False means nothing with pipeline_size"),
        ({"pipeline_size": 1, "pipeline_schedule": "zb_v"}, "pipeline_schedule='zb_v' means nothing without"),
        ({"pipeline_size": 1, "pipeline_microbatches": 8}, "pipeline_microbatches=8 means nothing without"),
        ({"pipeline_size": 1, "pipeline_split": ["a"]}, r"pipeline_split=\['a'\] means nothing without"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Options(**({"pipeline_size": 2} | options))


@pytest.mark.parametrize(
    ("sizes", "num_nodes", "num_processes", "expected"),
    [
        ({}, 1, 2, (1, 1)),
        ({}, 1, 8, (1, 4)),
        ({}, 2, 4, (1, 4)),  # A stage on each node.
        ({}, 4, 4, (2, 4)),
        ({}, 3, 4, (1, 6)),
        ({"replicate_size": 2}, 1, 8, (2, 2)),
        ({"shard_size": 2}, 1, 8, (2, 2)),
        ({"shard_size": 1, "replicate_size": 4}, 1, 8, (4, 1)),
    ],
)
def test_ranks_of_a_stage_are_replicas_and_shards(
    sizes: dict[str, int], num_nodes: int, num_processes: int, expected: tuple[int, int]
) -> None:
    chosen = MeshSizes(pipeline_size=2, **sizes)
    assert chosen.resolve(num_nodes=num_nodes, num_processes=num_processes) == expected


def test_an_odd_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 pipeline ranks = 2 ranks, but there are 3"):
        MeshSizes(pipeline_size=2).resolve(num_nodes=1, num_processes=3)
