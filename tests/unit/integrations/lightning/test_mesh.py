"""Sizes of the mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lightning_muon.integrations.lightning.mesh import MeshSizes
from tests.support.processes import ProcessPool


@pytest.mark.parametrize(
    ("sizes", "nodes", "devices", "expected"),
    [
        ({}, 1, 1, (1, 1)),
        ({}, 1, 4, (1, 4)),
        ({}, 3, 8, (3, 8)),
        ({"replicate_size": 2}, 1, 4, (2, 2)),
        ({"replicate_size": 1}, 2, 4, (1, 8)),
        ({"shard_size": 2}, 2, 4, (4, 2)),
        ({"shard_size": 1}, 1, 4, (4, 1)),
        ({"replicate_size": 4, "shard_size": 2}, 2, 4, (4, 2)),
        ({"data_parallel_size": 8}, 2, 4, (1, 8)),
        ({"data_parallel_size": 4, "shard_size": 4, "replicate_size": 1}, 1, 4, (1, 4)),
        ({"tensor_parallel_size": 1}, 1, 2, (1, 2)),
    ],
)
def test_what_is_not_given_follows(sizes: Any, nodes: int, devices: int, expected: Any) -> None:
    assert MeshSizes(**sizes).resolve(num_nodes=nodes, num_processes=devices) == expected


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"shard_size": 3}, "shard_size=3 does not divide the number of ranks, 8"),
        ({"replicate_size": 3}, "replicate_size=3 does not divide"),
        ({"replicate_size": 2, "shard_size": 2}, "= 4 ranks, but there are 8 .*2 nodes x 4 devices.*replicate_size=2"),
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
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1, got 2"),
        ({"data_parallel_size": 4, "replicate_size": 2}, "contradicts"),
        ({"data_parallel_size": 4, "shard_size": 2}, "contradicts"),
    ],
)
def test_impossible_sizes_are_errors_at_once(sizes: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MeshSizes(**sizes)


def _meshes(**sizes: int) -> list[Any]:
    layout = {"num_nodes": 1, "num_processes": dist.get_world_size()}
    return [(mesh.mesh_dim_names, tuple(mesh.shape)) for mesh in MeshSizes(**sizes).make("cpu", **layout)]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, [(("replicate", "shard"), (1, 4)), (("shard",), (4,))]),
        ({"replicate_size": 2}, [(("replicate", "shard"), (2, 2))] * 2),
        ({"shard_size": 1}, [(("replicate", "shard"), (4, 1))] * 2),
        ({"data_parallel_size": 4}, [(("data_parallel", "tensor_parallel"), (4, 1)), (("data_parallel",), (4,))]),
    ],
)
def test_the_mesh_has_the_axes_that_its_users_expect(gloo: ProcessPool, sizes: Any, expected: Any) -> None:
    assert gloo.run(_meshes, **sizes) == [expected] * 4
