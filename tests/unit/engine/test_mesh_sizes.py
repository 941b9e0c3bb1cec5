"""Sizes of the mesh."""

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_muon.engine.mesh_sizes import MeshSizes
from tests.support.processes import ProcessPool


@pytest.mark.parametrize(
    ("sizes", "nodes", "devices", "expected"),
    [
        ({}, 3, 8, (3, 8)),
        ({"replicate_size": 2}, 1, 4, (2, 2)),
        ({"replicate_size": 1}, 2, 4, (1, 8)),
        ({"shard_size": 2}, 2, 4, (4, 2)),
        ({"shard_size": 1}, 1, 4, (4, 1)),
        ({"data_parallel_size": 8}, 2, 4, (1, 8)),
        ({"tensor_parallel_size": 1}, 3, 2, (3, 2)),
        ({"context_size": 2}, 1, 4, (1, 2)),
        ({"context_size": 2, "tensor_size": 2}, 3, 8, (3, 2)),
        ({"tensor_size": 3}, 3, 4, (1, 4)),
        ({"shard_size": 2, "context_size": 2}, 1, 12, (3, 2)),
        ({"replicate_size": 3, "tensor_size": 2}, 1, 12, (3, 2)),
        ({"data_parallel_size": 2, "tensor_parallel_size": 4}, 2, 4, (1, 2)),
        ({"tensor_parallel_size": 2}, 2, 4, (1, 4)),
        ({"tensor_parallel_size": 2, "replicate_size": 2}, 2, 4, (2, 2)),
    ],
)
def test_what_is_not_given_follows(sizes: Any, nodes: int, devices: int, expected: Any) -> None:
    assert MeshSizes(**sizes).resolve(num_nodes=nodes, num_processes=devices) == expected


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"shard_size": 3}, "^2 replicas x 3 shards = 6 ranks, but there are 8 .*change shard_size=3, or"),
        ({"replicate_size": 3}, "^3 replicas x 2 shards = 6"),
        ({"tensor_size": 3}, "x 3 tensor ranks = 6 ranks"),
        ({"shard_size": 4, "context_size": 4}, "x 4 shards x 4 context ranks = 16 .*shard_size=4, context_size=4, or"),
        ({"replicate_size": 2, "shard_size": 2}, "= 4 ranks, but there are 8 .*2 nodes x 4 devices.*replicate_size=2"),
        (
            {"replicate_size": 2, "shard_size": 2, "context_size": 3, "tensor_size": 4},
            "2 replicas x 2 shards x 3 context ranks x 4 tensor ranks = 48 ranks, .*context_size=3, tensor_size=4, or",
        ),
        ({"data_parallel_size": 4}, "but there are 8"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(sizes: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MeshSizes(**sizes).resolve(num_nodes=2, num_processes=4)


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"replicate_size": 0}, "replicate_size must be"),
        ({"shard_size": "all"}, "shard_size must be"),
        ({"shard_size": True}, "shard_size must be"),
        ({"context_size": "auto"}, "context_size must be an integer"),
        ({"tensor_size": 0}, "tensor_size must be an integer"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be 'auto' or an integer"),
        ({"tensor_size": 2, "tensor_parallel_size": 1}, "tensor_size=2 contradicts tensor_parallel_size=1"),
        ({"data_parallel_size": 4, "replicate_size": 2}, "contradicts"),
        ({"data_parallel_size": 4, "shard_size": 2}, "contradicts"),
        ({"data_parallel_size": 4, "context_size": 2}, "no context axis for context_size=2"),
    ],
)
def test_impossible_sizes_are_errors_at_once(sizes: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MeshSizes(**sizes)


def _timeouts(**sizes: int) -> set[datetime.timedelta]:
    groups: Any = [
        dist.group.WORLD,
        *MeshSizes(**sizes).make("cpu", num_nodes=1, num_processes=4).user.get_all_groups(),
    ]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


@pytest.mark.parametrize("sizes", [{"replicate_size": 2}, {"data_parallel_size": 2, "tensor_parallel_size": 2}])
def test_all_axes_have_the_timeout_of_the_run(gloo: ProcessPool, sizes: Any) -> None:
    assert gloo.run(_timeouts, timeout=100.0, **sizes) == [{datetime.timedelta(seconds=75)}] * 4
