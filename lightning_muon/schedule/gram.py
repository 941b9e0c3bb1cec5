"""What a step would cost if ranks iterated on Gram matrices instead of whole matrices. An estimate; nothing runs it.

For an l x s matrix X (l >= s) every Newton-Schulz iterate is X times a polynomial in G = X^T X, so that iterating on
s x s matrices is enough: G_0 = X^T X; then, in each of T steps, P = a I + b G + c G^2, Q <- Q P, G <- P G P; at the end
X Q. The arithmetic is the same on paper; in bfloat16 it is not, since G squares the condition number.

With X cut along its long side into n pieces X_i, G_0 is the sum of X_i^T X_i over the ranks and the result is X_i Q.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, for the iteration; the rest is counting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

# A Gram matrix travels in float32: its small eigenvalues are lost in less.
GRAM_ITEMSIZE = 4


@dataclass(frozen=True, kw_only=True)
class GramCost:
    """Work and traffic of the busiest rank.

    Attributes:
        name: Which way.
        flops: Of the busiest rank.
        bytes: Of the busiest rank, the larger of sent and received of each phase, added up.
    """

    name: str
    flops: int
    bytes: int


def iteration_flops(short: int, num_steps: int) -> int:
    """FLOPs of T iterations on s x s matrices: ``2 s^3 (4 T - 3)``.

    Each step squares G (one product of 2 s^3); all but the first multiply Q by P (one), and all but the last make
    P G P (two).
    """
    return 2 * short**3 * (4 * num_steps - 3)


def ends_flops(long: int, short: int) -> int:
    """FLOPs of X^T X and of X Q: ``4 l s^2``."""
    return 4 * long * short**2


def gram_costs(
    sizes: Sequence[tuple[int, int]], *, num_ranks: int, num_steps: int, itemsize: int
) -> tuple[GramCost, ...]:
    """Three ways to use the Gram matrices.

    ``all-reduce``: the pieces stay, each G is summed over all ranks (a ring sends ``2 (n - 1) / n s^2`` numbers), and
    every rank repeats the iteration: ``sum of 4 l s^2 / n + 2 s^3 (4 T - 3)``.

    ``owners``: the pieces stay, each G is summed on one owner that sends Q back (as many bytes), and owners divide the
    iterations: ``sum of 4 l s^2 / n + max over owners of their sum of 2 s^3 (4 T - 3)``.

    ``groups``: n // K ranks (at least one) serve each of the K matrices: they fetch its pieces, all-reduce G among
    them, repeat the iteration, and send the pieces of the result back.

    A matrix that is cut along its short side must be cut along the long one first: ``(n - 1) / n`` of the elements that
    a rank holds, once each way. FSDP2 cuts rows, so this is so for all matrices with fewer rows than columns.

    Args:
        sizes: ``(rows, cols)`` of each matrix.
        num_ranks: n.
        num_steps: T.
        itemsize: Bytes of an element of a momentum or an update on the wire.
    """
    n, count = num_ranks, len(sizes)
    sides = [(max(size), min(size)) for size in sizes]
    ends = sum(ends_flops(long, short) for long, short in sides) // n
    iterations = [iteration_flops(short, num_steps) for _, short in sides]
    grams = sum(short * short for _, short in sides) * GRAM_ITEMSIZE
    turned = sum(rows * cols for rows, cols in sizes if rows < cols) * itemsize * 2 // n
    all_reduce = (2 * grams + turned) * (n - 1) // n
    members = max(1, n // max(1, count))
    served = _largest_load(
        [ends_flops(long, short) // members + iterations[i] for i, (long, short) in enumerate(sides)], n // members
    )
    fetched = _largest_load(
        [
            2 * itemsize * long * short // members + 2 * GRAM_ITEMSIZE * short**2 * (members - 1) // members
            for long, short in sides
        ],
        n // members,
    )
    return (
        GramCost(name="all-reduce", flops=ends + sum(iterations), bytes=all_reduce),
        GramCost(name="owners", flops=ends + _largest_load(iterations, n), bytes=all_reduce),
        GramCost(name=f"groups of {members}", flops=served, bytes=fetched),
    )


def _largest_load(costs: Sequence[int], num_owners: int) -> int:
    """Load of the busiest of ``num_owners``, largest first to the least loaded."""
    loads = [0] * num_owners
    heapify(loads)
    for cost in sorted(costs, reverse=True):
        heapreplace(loads, loads[0] + cost)
    return max(loads)
