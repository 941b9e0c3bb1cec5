"""Which way gradients take between nodes: the bytes of each, and when which is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_muon.schedule.between_nodes import choose_exchange, node_grid, shard_exchanges
from lightning_muon.schedule.cost import PRESETS

H100 = PRESETS["h100"]
MIB = 2**20


def _nodes(num_nodes: int, local: int) -> list[int]:
    return [rank // local for rank in range(num_nodes * local)]


@pytest.mark.parametrize(
    ("nodes", "grid"),
    [
        ([0, 0, 1, 1], ((0, 1), (2, 3))),
        ([0, 1, 0, 1], ((0, 2), (1, 3))),
        ([5, 5, 3, 3, 9, 9], ((0, 1), (2, 3), (4, 5))),
        ([0, 0, 0], ()),
        ([0, 1, 2], ()),
        ([0, 0, 1], ()),
        ([0, 1, 1, 0], ()),  # The second places, ranks 3 and 2, would add up node 1 before node 0.
        ([0], ()),
    ],
)
def test_a_grid_needs_equally_many_ranks_on_several_nodes(nodes: list[int], grid: tuple[tuple[int, ...], ...]) -> None:
    assert node_grid(nodes) == grid


@pytest.mark.parametrize(("num_nodes", "local"), [(2, 2), (8, 8), (3, 4)])
def test_nodes_that_sum_first_send_the_floor_and_direct_ways_as_often_as_a_node_has_ranks(
    num_nodes: int, local: int
) -> None:
    size = 12_000_000
    direct, hierarchical = shard_exchanges([_nodes(num_nodes, local)], size, H100, bucket_bytes=MIB, may_grow=False)
    floor = 2 * size * (num_nodes - 1) / num_nodes  # Gradients leave, and values.
    assert hierarchical.node_bytes == pytest.approx(floor)
    assert direct.node_bytes == pytest.approx(local * floor)
    assert len(hierarchical.grid) == num_nodes and not direct.grid


def test_tiny_models_go_straight_and_large_ones_through_their_nodes() -> None:
    chosen = [
        choose_exchange([_nodes(2, 2)], size, H100, bucket_bytes=25 * MIB, may_grow=False) for size in (10**5, 10**8)
    ]
    assert [bool(each.grid) for each in chosen] == [False, True]


def test_links_between_nodes_that_cost_nothing_leave_the_direct_way() -> None:
    fast = replace(H100, bandwidth=(1e9, 1e15), latency_seconds=(0.0,), op_seconds=0.0)
    assert not choose_exchange([_nodes(2, 2)], 10**9, fast, bucket_bytes=25 * MIB, may_grow=True).grid


def test_one_node_keeps_its_way_and_its_buckets() -> None:
    chosen = choose_exchange([[0] * 8, [1] * 8], 32 * 10**9, H100, bucket_bytes=25 * MIB, may_grow=True)
    assert (chosen.grid, chosen.bucket_bytes, chosen.node_bytes) == ((), 25 * MIB, 0)


def test_buckets_grow_with_the_model_to_a_64th_of_it_and_not_unless_they_may() -> None:
    for size in (10**8, 32 * 10**9):
        grown = choose_exchange([_nodes(8, 8)], size, H100, bucket_bytes=25 * MIB, may_grow=True)
        assert 25 * MIB <= grown.bucket_bytes <= max(25 * MIB, size // 64)
    assert grown.bucket_bytes > 200 * MIB
    fixed = choose_exchange([_nodes(8, 8)], 32 * 10**9, H100, bucket_bytes=25 * MIB, may_grow=False)
    assert fixed.bucket_bytes == 25 * MIB
    assert fixed.seconds > grown.seconds


def test_replicas_that_lie_differently_all_go_straight() -> None:
    replicas = [[0, 0, 1, 1], [1, 2, 2, 2]]
    assert not any(each.grid for each in shard_exchanges(replicas, 10**9, H100, bucket_bytes=MIB, may_grow=False))
