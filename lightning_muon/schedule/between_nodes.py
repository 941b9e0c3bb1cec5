"""How gradients and new values travel over a shard axis that spans several nodes: to each rank, or to each node once.

*direct*: every rank sends each other rank its part. *hierarchical*: gradients are summed inside each node first, and
one sum leaves it, over the ranks of equal place in their nodes; new values enter a node once, and are then sent around
inside. With N bytes on M nodes of L ranks (M - 1) / M N leave each node in either direction of a step, directly L times
as much. M nodes cannot do with less: each must send its sum of what the others hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.program import TRANSFER, Op

# With more than this part of the model on its way at a time, buffers count beside the weights, and the end of backward
# has little to hide the last bucket behind.
_LEAST_BUCKETS = 64
Grid = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ShardExchange:
    """One way, and what it costs in a step.

    Attributes:
        grid: For each node the ranks of the shard axis on it, if nodes sum first; empty: direct.
        bucket_bytes: Of gradients that travel together.
        node_bytes: That leave each node for others, gradients and new values together; mean over the nodes.
        seconds: Of the step's transfers and sums, one bucket after the other.
    """

    grid: Grid
    bucket_bytes: int
    node_bytes: int
    seconds: float


def node_grid(nodes: Sequence[int]) -> Grid:
    """For each node its ranks, or nothing unless there are several nodes of several ranks each, equally many.

    The ranks of equal place in their nodes must be in the order of the nodes, so that every rank adds up the nodes in
    the same order.

    Args:
        nodes: Number of the node of each rank.
    """
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    sizes = {len(each) for each in ranks.values()}
    is_grid = len(ranks) > 1 and len(sizes) == 1 and sizes != {1}
    columns = zip(*ranks.values(), strict=True) if is_grid else ()
    return tuple(map(tuple, ranks.values())) if is_grid and all(list(c) == sorted(c) for c in columns) else ()


def shard_exchanges(
    nodes: Sequence[Sequence[int]], num_bytes: int, cost: CostModel, *, bucket_bytes: int, may_grow: bool
) -> list[ShardExchange]:
    """The direct way, and the hierarchical one where there is one, each with its best size of buckets.

    Args:
        nodes: For each replica the number of the node of each rank of its shard axis.
        num_bytes: Of all gradients.
        cost: The machine; its second link is between nodes.
        bucket_bytes: Size of buckets.
        may_grow: Whether buckets may be larger, where the shard axis of any replica spans several nodes.
    """
    grids = {node_grid(replica) for replica in nodes}
    spans = any(len(set(replica)) > 1 for replica in nodes)
    sizes = [bucket_bytes]
    larger = num_bytes // _LEAST_BUCKETS
    while may_grow and spans and larger > bucket_bytes:
        sizes.append(larger)
        larger //= 2
    ways: list[Grid] = [()]
    # Ranks must launch the same buckets in all replicas.
    if all(grids) and len({(len(grid), len(grid[0])) for grid in grids}) == 1:
        ways += sorted(grids)[:1]
    return [min((_priced(nodes[0], grid, num_bytes, cost, size) for size in sizes), key=_seconds) for grid in ways]


def choose_exchange(
    nodes: Sequence[Sequence[int]], num_bytes: int, cost: CostModel, *, bucket_bytes: int, may_grow: bool
) -> ShardExchange:
    """The faster one of :func:`shard_exchanges`; pure, so equal on all ranks that know the same nodes."""
    return min(shard_exchanges(nodes, num_bytes, cost, bucket_bytes=bucket_bytes, may_grow=may_grow), key=_seconds)


def _seconds(exchange: ShardExchange) -> float:
    return exchange.seconds


def _priced(nodes: Sequence[int], grid: Grid, num_bytes: int, cost: CostModel, bucket_bytes: int) -> ShardExchange:
    size, num_nodes = len(nodes), len(set(nodes))
    local = size / num_nodes
    number = max(1, -(-num_bytes // bucket_bytes))
    bucket = num_bytes / number
    # For each exchange: the bytes that a rank sends inside its node and to other ones, and the shares it adds up.
    if grid:
        legs = [(bucket * (local - 1) / local, 0.0, local - 1), (0.0, bucket * (num_nodes - 1) / size, num_nodes - 1)]
    else:
        legs = [(bucket * (local - 1) / size, bucket * (size - local) / size, size - 1.0)]
    transfers = [_transfer_seconds(inside, outside, cost) for inside, outside, _ in legs]
    sums = sum(shares * cost.op_seconds for *_, shares in legs)
    sums += 3 * sum(inside + outside for inside, outside, _ in legs) / cost.memory_bytes_per_second
    there = (number - 1) * max(*transfers, sums) + sum(transfers) + sums
    back = (number - 1) * max(transfers) + sum(transfers)
    left = 2 * number * local * sum(outside for _, outside, _ in legs)
    return ShardExchange(grid=grid, bucket_bytes=bucket_bytes, node_bytes=round(left), seconds=there + back)


def _transfer_seconds(inside: float, outside: float, cost: CostModel) -> float:
    sizes = (round(inside), round(outside))
    return cost.seconds(
        Op(kind="exchange", key="", rank=0, lane=TRANSFER, bytes=sum(sizes), axis_bytes=sizes, group=(0, 1))
    )
