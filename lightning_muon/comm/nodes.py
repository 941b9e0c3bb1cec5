"""Which ranks share a node, and the exchanges that bring parts to their holders."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.mesh import AxisGroup, PrivateGroups, host_group


def nodes_of(group: AxisGroup) -> list[int]:
    """The number of the node of each rank of ``group``: ranks with the same host name and the same torchrun agent.

    Collective over ``group``; every rank must call it.
    """
    if group.group is None:
        return [0]
    # Machines may have the same name ("localhost"); torchrun numbers its agents, one for each machine.
    name = socket.gethostname(), os.environ.get("GROUP_RANK", "")
    names = gather(name, host_group(group).group)
    return [names.index(each) for each in names]


@dataclass(frozen=True)
class Hop:
    """One exchange on the way of shares to the ranks of a shard axis that hold the sums; values take the way back.

    Attributes:
        group: Ranks that exchange, with a process group that nobody else communicates over.
        parts: For each of them the ranks of the shard axis whose parts it adds up here. The part of the calling rank's
            place in the next hop comes last, so that what it keeps and what it sends are one range each.
    """

    group: AxisGroup
    parts: tuple[tuple[int, ...], ...]


def make_hops(group: AxisGroup, grid: Sequence[Sequence[int]] = ()) -> list[Hop]:
    """The exchanges, with groups of their own.

    Collective over ``group``; every rank must call it, in the same order of calls.

    Args:
        group: The shard axis.
        grid: For each node its ranks, all equally many: sums are made inside each node, and then between the ranks of
            equal place in their nodes. Empty: one exchange among all ranks.
    """
    private = PrivateGroups()
    if not grid:
        (own,) = private.of([group])
        return [Hop(own, tuple((rank,) for rank in range(group.size)))]
    node = next(index for index, ranks in enumerate(grid) if group.rank in ranks)
    place = grid[node].index(group.rank)
    order = [*(index for index in range(len(grid)) if index != node), node]
    inside = private.among(group, grid[node])
    across = private.among(group, [ranks[place] for ranks in grid])
    return [
        Hop(inside, tuple(tuple(grid[index][other] for index in order) for other in range(len(grid[node])))),
        Hop(across, tuple((ranks[place],) for ranks in grid)),
    ]
