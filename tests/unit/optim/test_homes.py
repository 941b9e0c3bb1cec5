"""Where matrices are exchanged, without a mesh; meshes are in tests/distributed/test_binding.py."""

from __future__ import annotations

from lightning_muon.comm.mesh import AxisGroup
from lightning_muon.optim.homes import ExchangeHome, ExchangeHomes, Loads
from lightning_muon.schedule.muon import MatrixSpec, plan_step


def test_local_tensors_are_at_home_in_their_process() -> None:
    homes = ExchangeHomes()
    home = homes.get(None, (), is_shared=True)
    assert (home.axes.group, home.axes.size, home.replica_of, home.spans_replicas) == (None, 1, (0,), False)
    assert homes.get(None, (), is_shared=True) is home


def _home(
    mesh_axes: tuple[int, ...], coordinates: tuple[tuple[int, ...], ...], replicas: tuple[int, ...]
) -> ExchangeHome:
    return ExchangeHome(None, mesh_axes, mesh_axes[-1:], AxisGroup(None, 0, coordinates), replicas)


def test_work_that_every_replica_repeats_counts_on_the_same_place_of_each() -> None:
    replica = _home((1,), ((0, 0), (0, 1)), (0, 0))
    grid = _home((0, 1), ((0, 0), (0, 1), (1, 0), (1, 1)), (0, 0, 1, 1))
    loads = Loads()
    specs = [MatrixSpec(name="w", numel=8, flops=100, held=(4, 4))]
    plan = plan_step(specs, num_ranks=2, itemsize=2, chunk_bytes=1)
    (owner,) = plan.owners[0]
    loads.add(replica, specs, plan, itemsize=2)
    expected = [(100, 16) if place == owner else (0, 0) for place in (0, 1)]
    assert loads.of(replica) == expected
    assert loads.of(grid) == expected * 2


def test_replicas_have_the_same_loads_whatever_else_their_ranks_do() -> None:
    """Mesh (shard, tensor): a matrix over both axes is on one rank, and others are replicated over the second axis."""
    both = _home((0, 1), ((0, 0), (0, 1), (1, 0), (1, 1)), (0, 0, 0, 0))
    replicas = [_home((0,), ((0, tensor), (1, tensor)), (0, 0)) for tensor in (0, 1)]
    loads = Loads()
    specs = [MatrixSpec(name="w", numel=8, flops=100, held=(2, 2, 2, 2))]
    plan = plan_step(specs, num_ranks=4, itemsize=2, chunk_bytes=1)
    (owner,) = plan.owners[0]
    loads.add(both, specs, plan, itemsize=2)
    expected = [(100, 16) if place == owner // 2 else (0, 0) for place in (0, 1)]
    assert [loads.of(home) for home in replicas] == [expected, expected]
