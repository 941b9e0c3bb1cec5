"""Models that differ between ranks are an error on all of them."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_muon.engine.mesh_sizes import MeshSizes
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.shard_model import shard_model
from tests.distributed.sharding.training import mesh_of
from tests.support.processes import ProcessPool


def _shard_different(what: str) -> None:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 4 + rank * (what == "shapes")), nn.Linear(4, 4), nn.Linear(4, 4))
    policies: dict[str, Any] = {
        "shapes": "auto",
        "units": lambda name, _: name == str(1 + rank % 2),
        "class": ["Linear" if rank == 0 else "Missing"],
        "policy": lambda *_: {}["missing"] if rank == 1 else False,
    }
    try:
        shard_model(model, mesh_of((1, 3)), ModeOptions(wrap_policy=policies[what]))
    except (RuntimeError, ValueError, KeyError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("shapes", r"Sequential differs .*'0.weight' \(4, 4\) float32.*\(5, 4\)"),
        ("units", "Sequential differs between ranks: .*FSDP2 unit"),
        ("class", "no module is a Missing"),
        ("policy", "KeyError"),
    ],
)
def test_what_differs_between_ranks_is_an_error_on_all(gloo: ProcessPool, what: str, match: str) -> None:
    gloo.expect_error_on_all_ranks(_shard_different, what, world_size=3, exception=RuntimeError, match=match)


def _different_beside_tensor_parallel(num_outputs: tuple[int, ...]) -> None:
    meshes = MeshSizes(shard_size=2, tensor_size=2).make("cpu", num_nodes=1, num_processes=dist.get_world_size())
    model = nn.Sequential(nn.Linear(7, 14), nn.Linear(14, 7), nn.Linear(7, num_outputs[dist.get_rank()]))
    parallelize_module(model, meshes.tensor, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    shard_model(model, meshes.data, ModeOptions())


# In the second case all data ranks of one tensor rank agree with each other, but not with the other tensor rank.
@pytest.mark.parametrize("num_outputs", [(5, 6, 5, 5), (5, 6, 5, 6)])
def test_a_rank_with_another_model_stops_all_tensor_ranks(gloo: ProcessPool, num_outputs: tuple[int, ...]) -> None:
    match = r"Sequential differs between ranks: .*'2.weight' \([56], 7\) float32.*\([56], 7\)"
    gloo.expect_error_on_all_ranks(_different_beside_tensor_parallel, num_outputs, match=match, exception=RuntimeError)
