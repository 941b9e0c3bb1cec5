"""Who owns what, planned from shapes alone; from tensors on real meshes in tests/distributed/test_step_plan.py."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from lightning_muon.config import MuonConfig
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulzOptions
from lightning_muon.params.exchange import (
    ExchangeRanks,
    MeshRanks,
    ParameterToPlan,
    Pieces,
    PlacedMatrix,
    PlannedExchange,
    PlanOptions,
    loads_so_far,
    plan_exchanges,
)
from lightning_muon.params.logical import Box, LogicalMatrix, ShardBoxes
from lightning_muon.params.routing import route_by_shape
from lightning_muon.schedule.assign import MatrixShards, MatrixSpec
from lightning_muon.schedule.muon import plan_step

LOCAL = MeshRanks.of_shape(())
NEWTON_SCHULZ = NewtonSchulzOptions.of(vars(MuonConfig()))
OPTIONS = PlanOptions(
    itemsize=4,
    arithmetic=Arithmetic("cpu", torch.float32),
    chunk_bytes=100,
    assignment="lpt",
    dedupe="always",
    look_ahead=2,
    overlap="step",
)


def test_every_rank_comes_to_the_same_owners() -> None:
    """Uneven shards, an empty shard, a replicated and a local matrix, on a mesh of 2 x 3 ranks."""
    placements = {(13, 7): (Replicate(), Shard(0)), (2, 9): (Replicate(), Shard(0)), (4, 4): (Replicate(), Replicate())}
    found = []
    for rank in range(6):
        mesh = MeshRanks.of_shape((2, 3), rank)
        parameters = [
            ParameterToPlan(route_by_shape(f"w{i}", shape), shape, mesh, places, NEWTON_SCHULZ)
            for i, (shape, places) in enumerate([*placements.items()] * 2)
        ]
        found.append(plan_exchanges(parameters, OPTIONS))
    descriptions = [
        [
            ([matrix.spec.shards.held for matrix in each.matrices], each.plan.owners, each.ranks.replica_of)
            for each in plans
        ]
        for plans in found
    ]
    assert descriptions == descriptions[:1] * 6
    sharded, replicated = descriptions[0]
    assert sharded[0] == [(35, 35, 21) * 2, (9, 9, 0) * 2] * 2
    assert sharded[2] == (0, 0, 0, 1, 1, 1)
    assert replicated[0] == [(16,) * 6] * 2


GRID = ((0, 0), (0, 1), (1, 0), (1, 1))


def _ranks(mesh_axes: tuple[int, ...], coordinates: tuple, replicas: tuple[int, ...]) -> ExchangeRanks:
    return ExchangeRanks(LOCAL, mesh_axes, mesh_axes[-1:], coordinates, 0, replicas)


@pytest.mark.parametrize(
    ("earlier", "later", "rank_of_owner"),
    [
        # Work that is repeated in every replica counts in each of them.
        (_ranks((1,), GRID[:2], (0, 0)), [_ranks((1,), GRID[:2], (0, 0)), _ranks((0, 1), GRID, (0, 0, 1, 1))], 1),
        # Mesh (shard, tensor): the matrix is over both axes, on one rank; others are replicated over the second axis,
        # and all replicas of these must see the same loads.
        (_ranks((0, 1), GRID, (0,) * 4), [_ranks((0,), (GRID[t], GRID[2 + t]), (0, 0)) for t in (0, 1)], 2),
    ],
    ids=["repeated", "replicas"],
)
def test_loads_are_equal_in_all_replicas(earlier: ExchangeRanks, later: list, rank_of_owner: int) -> None:
    shards = MatrixShards([8 // earlier.size] * earlier.size, [0] * earlier.size)
    spec = MatrixSpec(name="w", rows=8, cols=1, flops=100, shards=shards)
    plan = plan_step([spec], itemsize=2, chunk_bytes=1)
    (owner,) = plan.owners[0]
    matrix = LogicalMatrix("w", Box((0, 0), (8, 1)), 8, 1)
    pieces = Pieces(matrix.box, ShardBoxes([matrix.box]), shards, None)
    planned = [PlannedExchange(earlier, (PlacedMatrix(0, matrix, pieces, None, spec),), plan)]
    expected = [(100, 16) if place == owner // rank_of_owner else (0, 0) for place in (0, 1)]
    for ranks in later:
        assert loads_so_far(ranks, planned, itemsize=2) == expected * (ranks.size // 2)
