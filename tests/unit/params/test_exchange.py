"""Who owns what, planned from shapes alone; from tensors on real meshes in tests/distributed/test_binding.py."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard

from lightning_muon.params.exchange import (
    ExchangeRanks,
    Loads,
    MeshRanks,
    ParameterToPlan,
    PlanOptions,
    exchange_ranks,
    plan_exchanges,
)
from lightning_muon.params.routing import route_by_shape
from lightning_muon.schedule.muon import MatrixSpec, plan_step

LOCAL = MeshRanks.of_shape(())


def test_local_tensors_stay_in_their_process() -> None:
    ranks = exchange_ranks(LOCAL, (), True)
    assert (ranks.size, ranks.replica_of, ranks.spans_replicas) == (1, (0,), False)


def test_every_rank_comes_to_the_same_owners() -> None:
    """Uneven shards, an empty shard, a replicated and a local matrix, on a mesh of 2 x 3 ranks."""
    placements = {(13, 7): (Replicate(), Shard(0)), (2, 9): (Replicate(), Shard(0)), (4, 4): (Replicate(), Replicate())}
    found = []
    for rank in range(6):
        mesh = MeshRanks.of_shape((2, 3), rank)
        parameters = [
            ParameterToPlan(route_by_shape(f"w{i}", shape), shape, mesh, places, 5)
            for i, (shape, places) in enumerate([*placements.items()] * 2)
        ]
        found.append(plan_exchanges(parameters, _options("always")))
    descriptions = [[(each.specs, each.plan.owners, each.ranks.replica_of) for each in plans] for plans in found]
    assert descriptions == descriptions[:1] * 6
    sharded, replicated = descriptions[0]
    assert [spec.held for spec in sharded[0]] == [(35, 35, 21) * 2, (9, 9, 0) * 2] * 2
    assert sharded[2] == (0, 0, 0, 1, 1, 1)
    assert [spec.held for spec in replicated[0]] == [(16,) * 6] * 2


def _options(dedupe: str) -> PlanOptions:
    return PlanOptions(
        itemsize=4,
        device_type="cpu",
        chunk_bytes=100,
        assignment="lpt",
        dedupe=dedupe,  # type: ignore[arg-type]
        look_ahead=2,
        overlap="step",
    )


def _ranks(
    mesh_axes: tuple[int, ...], coordinates: tuple[tuple[int, ...], ...], replicas: tuple[int, ...]
) -> ExchangeRanks:
    return ExchangeRanks(LOCAL, mesh_axes, mesh_axes[-1:], coordinates, 0, replicas)


def test_repeated_work_counts_in_every_replica() -> None:
    replica = _ranks((1,), ((0, 0), (0, 1)), (0, 0))
    grid = _ranks((0, 1), ((0, 0), (0, 1), (1, 0), (1, 1)), (0, 0, 1, 1))
    loads = Loads()
    specs = [MatrixSpec(name="w", numel=8, flops=100, held=(4, 4))]
    plan = plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=1)
    (owner,) = plan.owners[0]
    loads.add(replica, specs, plan, itemsize=2)
    expected = [(100, 16) if place == owner else (0, 0) for place in (0, 1)]
    assert loads.of(replica) == expected
    assert loads.of(grid) == expected * 2


def test_replicas_have_the_same_loads() -> None:
    """Mesh (shard, tensor): a matrix over both axes is on one rank, and others are replicated over the second axis."""
    both = _ranks((0, 1), ((0, 0), (0, 1), (1, 0), (1, 1)), (0, 0, 0, 0))
    replicas = [_ranks((0,), ((0, tensor), (1, tensor)), (0, 0)) for tensor in (0, 1)]
    loads = Loads()
    specs = [MatrixSpec(name="w", numel=8, flops=100, held=(2, 2, 2, 2))]
    plan = plan_step(specs, num_ranks=4, itemsize=2, chunk_bytes=1)
    (owner,) = plan.owners[0]
    loads.add(both, specs, plan, itemsize=2)
    expected = [(100, 16) if place == owner // 2 else (0, 0) for place in (0, 1)]
    assert [loads.of(each) for each in replicas] == [expected, expected]
