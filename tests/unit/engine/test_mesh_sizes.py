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
        ({"context_size": 2}, 1, 4, (1, 2)),
        ({"context_size": 2, "tensor_size": 2}, 3, 8, (3, 2)),
        ({"tensor_size": 3}, 3, 4, (1, 4)),
        ({"shard_size": 2, "context_size": 2}, 1, 12, (3, 2)),
        ({"replicate_size": 3, "tensor_size": 2}, 1, 12, (3, 2)),
        # Stages on different nodes, replicas between those that are left.
        ({"pipeline_size": 2}, 1, 2, (1, 1)),
        ({"pipeline_size": 2}, 1, 8, (1, 4)),
        ({"pipeline_size": 2}, 2, 4, (1, 4)),
        ({"pipeline_size": 2}, 4, 4, (2, 4)),
        ({"pipeline_size": 2}, 3, 4, (1, 6)),
        ({"pipeline_size": 2, "replicate_size": 2}, 1, 8, (2, 2)),
        ({"pipeline_size": 2, "shard_size": 2}, 1, 8, (2, 2)),
        ({"pipeline_size": 2, "shard_size": 1, "replicate_size": 4}, 1, 8, (4, 1)),
    ],
)
def test_what_is_not_given_follows(sizes: Any, nodes: int, devices: int, expected: Any) -> None:
    assert MeshSizes(**sizes).resolve(num_nodes=nodes, num_processes=devices) == expected


def _timeouts(**sizes: int) -> set[datetime.timedelta]:
    groups: Any = [
        dist.group.WORLD,
        *MeshSizes(**sizes).make("cpu", num_nodes=1, num_processes=4).user.get_all_groups(),
    ]
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


@pytest.mark.parametrize("sizes", [{"replicate_size": 2}, {"context_size": 2, "tensor_size": 2}])
def test_all_axes_have_the_timeout_of_the_run(gloo: ProcessPool, sizes: Any) -> None:
    assert gloo.run(_timeouts, timeout=100.0, **sizes) == [{datetime.timedelta(seconds=75)}] * 4
