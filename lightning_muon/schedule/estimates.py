"""Estimates what is faster on a given machine: shared owners, sums inside each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_muon.schedule.cost import PRESETS, CostModel

_H100 = PRESETS["h100"]
# FLOP/s of Newton-Schulz over bytes/s between two replicas, per rank. CPU: measured on two cores with AVX-512 BF16 and
# gloo over loopback (benchmarks/plan_accuracy.py prints both).
_FLOPS_PER_BYTE = {"cuda": _H100.flops_per_second / _H100.bandwidth[-1], "cpu": 400.0}


def sharing_pays(
    flops: int, wire_bytes: int, *, device_type: str, num_matrices: int, num_replicas: int, replica_ranks: int
) -> bool:
    """Whether one owner for all R replicas is faster than one in each, if all N matrices are like this one.

    With S ranks in a replica, a rank computes ``m = max(1, N / S)`` matrices if replicas repeat the work. If they share
    it, it computes ``n = max(1, N / (R S))`` and sends each to R - 1 replicas. With speed F and bandwidth B sharing is
    faster if ``(m - n) flops / F > n (R - 1) wire_bytes / B``. ``wire_bytes`` are those of the whole matrix; unknown
    devices count as CUDA.
    """
    shared = max(1.0, num_matrices / (num_replicas * replica_ranks))
    repeated = max(1.0, num_matrices / replica_ranks)
    seconds_saved = (repeated - shared) * flops / _FLOPS_PER_BYTE.get(device_type, _FLOPS_PER_BYTE["cuda"])
    return seconds_saved > shared * (num_replicas - 1) * wire_bytes


# Least number of buckets: with larger ones, buffers take much memory beside the weights, and the last bucket is hidden
# behind little of backward.
_LEAST_BUCKETS = 64
Grid = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ShardExchange:
    """One way to exchange gradients and values over the shard axis, and its cost in a step."""

    grid: Grid  # For each node the ranks of the shard axis on it, if nodes sum first; empty: direct.
    bucket_bytes: int  # Bytes of gradients that are sent together.
    node_bytes: int  # Bytes that each node sends to others, gradients and new values together; mean over the nodes.
    seconds: float  # Time of the step's transfers and sums, one bucket after the other.
    return_seconds: float  # The part of it in which new values are sent back.


def node_grid(nodes: Sequence[int]) -> Grid:
    """The ranks of each node, from the node of each rank; empty unless several nodes have several, equally many ranks.

    Ranks of equal place must be in the order of the nodes, so that every rank adds up the nodes in the same order.
    """
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    sizes = {len(each) for each in ranks.values()}
    if len(ranks) == 1 or len(sizes) > 1 or sizes == {1}:
        return ()
    columns = zip(*ranks.values(), strict=True)
    return tuple(map(tuple, ranks.values())) if all(list(each) == sorted(each) for each in columns) else ()


def shard_exchanges(
    nodes: Sequence[Sequence[int]], num_bytes: int, cost: CostModel, *, bucket_bytes: int, may_grow: bool
) -> list[ShardExchange]:
    """The direct way, and the hierarchical one if there is one, with their best bucket sizes; alike on all ranks.

    ``nodes`` has for each replica the node of each rank of its shard axis. ``may_grow``: buckets may be larger, where
    the shard axis of any replica spans several nodes.
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
        ways.append(min(grids))
    return [
        min((_priced(nodes[0], grid, num_bytes, cost, size) for size in sizes), key=lambda way: way.seconds)
        for grid in ways
    ]


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
    transfers = [cost.transfer_seconds(inside, outside) for inside, outside, _ in legs]
    sums = sum(shares * cost.op_seconds for *_, shares in legs)
    sums += 3 * sum(inside + outside for inside, outside, _ in legs) / cost.memory_bytes_per_second
    there = (number - 1) * max(*transfers, sums) + sum(transfers) + sums
    back = (number - 1) * max(transfers) + sum(transfers)
    left = 2 * number * local * sum(outside for _, outside, _ in legs)
    return ShardExchange(
        grid=grid, bucket_bytes=bucket_bytes, node_bytes=round(left), seconds=there + back, return_seconds=back
    )
