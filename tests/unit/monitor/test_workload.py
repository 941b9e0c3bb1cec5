"""Optimizers with random weights of given shapes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from lightning_muon.monitor.calibrate import make_optimizer
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape
from tests.support.processes import ProcessPool

MODEL = ModelShapes(
    name="mixed",
    source="",
    parameters=(
        ParameterShape(name="a", shape=(5, 3), kind="matrix"),
        ParameterShape(name="qkv", shape=(6, 2), kind="matrix", splits=(2, 2, 2)),
        ParameterShape(name="experts", shape=(3, 4, 2), kind="stack", shard_dim=1),
        ParameterShape(name="norm", shape=(3,), kind="elementwise"),
        ParameterShape(name="frozen", shape=(9, 9), kind="matrix", frozen=True),
    ),
)


def _make(num_replicas: int) -> dict[str, object]:
    optimizer = make_optimizer(MODEL, num_replicas=num_replicas)
    muon, adamw = optimizer.param_groups
    before = [parameter.full_tensor().clone() for parameter in muon["params"]]
    optimizer.step()
    return {
        "names": [route.name for route in optimizer.routes],
        "algorithms": [route.algorithm for route in optimizer.routes],
        "splits": optimizer.routes[1].splits,
        "shapes": [tuple(parameter.shape) for parameter in (*muon["params"], *adamw["params"])],
        "placements": [parameter.placements for parameter in muon["params"]],
        "weights": before,
        "moved": [not torch.equal(b, p.full_tensor()) for b, p in zip(before, muon["params"], strict=True)],
    }


@pytest.mark.parametrize(("world_size", "num_replicas"), [(1, 1), (3, 1), (4, 2)])
def test_the_weights_have_the_shapes_and_placements_asked_for(
    gloo: ProcessPool, world_size: int, num_replicas: int
) -> None:
    results = gloo.run(_make, num_replicas, world_size=world_size)
    first = results[0]
    assert first["names"] == ["a", "qkv", "experts", "norm"]
    assert first["algorithms"] == ["muon", "muon", "muon", "adamw"]
    assert first["splits"] == (2, 2, 2)
    assert first["shapes"] == [(5, 3), (6, 2), (3, 4, 2), (3,)]
    assert first["placements"] == [(Replicate(), Shard(0)), (Replicate(), Shard(0)), (Replicate(), Shard(1))]
    assert all(first["moved"])
    for result in results:
        assert all(map(torch.equal, result["weights"], first["weights"])), "replicas hold equal weights"


def _uneven() -> None:
    make_optimizer(MODEL, num_replicas=dist.get_world_size() + 1)


def test_replicas_that_do_not_divide_the_ranks_are_refused(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_uneven, match="2 ranks cannot be divided into 3 replicas", world_size=2)
