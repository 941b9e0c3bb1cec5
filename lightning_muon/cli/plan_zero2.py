"""How ``sharding="zero2"`` sends gradients and new values where a replica lies on several nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightning_muon.cli.plan_report import table
from lightning_muon.cli.plan_specs import Mesh
from lightning_muon.grad_sync.reducer import BUCKET_BYTES
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.estimates import ShardExchange, shard_exchanges
from lightning_muon.schedule.shapes import ModelShapes

_ITEMSIZE = 4  # Of float32 parameters, whose gradients travel in their dtype.
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Zero2Plan:
    """All ways of one step.

    Attributes:
        ways: Direct, and hierarchical if there is such a way.
        chosen: The faster one. A run chooses by the rates of ``h100``, and on a CPU keeps the smallest buckets.
    """

    ways: list[ShardExchange]
    chosen: ShardExchange

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain numbers, for JSON."""
        return [
            {
                "way": _name(way),
                "is_chosen": way is self.chosen,
                "bucket_bytes": way.bucket_bytes,
                "node_bytes": way.node_bytes,
                "seconds": way.seconds,
            }
            for way in self.ways
        ]

    def to_text(self) -> str:
        """A table, and what it means."""
        rows = [
            (
                f"{_name(way)} *" if way is self.chosen else _name(way),
                f"{way.bucket_bytes / _MIB:,.0f}",
                f"{way.node_bytes / _MIB:,.0f}",
                f"{1e3 * way.seconds:,.1f}",
            )
            for way in self.ways
        ]
        text = table(("way", "bucket MiB", "leaves a node MiB", "transfers and sums ms"), rows)
        return (
            f"{text}\nGradients and values of float32 parameters, per node. * is faster; a run goes by --machine h100."
        )


def plan_zero2(model: ModelShapes, mesh: Mesh, cost: CostModel, *, node_ranks: int) -> Zero2Plan | None:
    """The ways, or nothing where every replica lies on one node.

    Args:
        model: Shapes.
        mesh: Sizes; ranks fill one node after the other.
        cost: The machine.
        node_ranks: Ranks of a node.
    """
    nodes = [
        [(replica * mesh.shard + rank) // node_ranks for rank in range(mesh.shard)] for replica in range(mesh.replicate)
    ]
    num_bytes = _ITEMSIZE * sum(math.prod(each.shape) for each in model.parameters if not each.frozen)
    if all(len(set(replica)) == 1 for replica in nodes) or not num_bytes:
        return None
    ways = shard_exchanges(nodes, num_bytes, cost, bucket_bytes=BUCKET_BYTES, may_grow=True)
    return Zero2Plan(ways=ways, chosen=min(ways, key=lambda way: way.seconds))


def _name(way: ShardExchange) -> str:
    return "hierarchical" if way.grid else "direct"
