"""Plan of one ParallelMuon step: the owner of every matrix and the chunks in which matrices travel."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_muon.schedule.assign import longest_first


@dataclass(frozen=True, kw_only=True)
class MatrixSpec:
    """What the planner must know of one matrix.

    Attributes:
        name: Qualified name, for people and for the fingerprint.
        numel: Number of elements.
        flops: Cost of Newton-Schulz.
        held: Number of elements on each rank of the exchange group. Their sum is ``numel`` for a sharded matrix, and
            each of them is ``numel`` for a replicated one.
    """

    name: str
    numel: int
    flops: int
    held: tuple[int, ...]


@dataclass(frozen=True)
class MuonPlan:
    """Plan for the matrices of one exchange group, equal on all of its ranks.

    Attributes:
        owners: Rank (in the group) that runs Newton-Schulz for each matrix.
        resident: Chunks of matrices that lie whole on their owner and nowhere else: they never travel.
        chunks: All other matrices, in the order in which backward finishes them; those of a chunk travel together.
        flops: Newton-Schulz load of each rank.
    """

    owners: tuple[int, ...]
    resident: tuple[tuple[int, ...], ...]
    chunks: tuple[tuple[int, ...], ...]
    flops: tuple[int, ...]

    def fingerprint(self) -> str:
        """Digest that is equal on two ranks just if their plans are."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def plan_step(specs: Sequence[MatrixSpec], *, num_ranks: int, itemsize: int, chunk_bytes: int) -> MuonPlan:
    """Assign owners and chunks, from sizes alone, so that every rank makes the same plan.

    Args:
        specs: In the order of the forward pass; chunks are filled from the last one.
        num_ranks: Size of the exchange group.
        itemsize: Bytes of an element on the wire.
        chunk_bytes: Upper bound of a chunk's whole matrices; a larger matrix is a chunk of its own.
    """
    costs = [spec.flops for spec in specs]
    sizes = [spec.numel * itemsize for spec in specs]
    loads = [(0, 0)] * num_ranks
    owners: dict[int, int] = {}
    for job, spec in enumerate(specs):
        holder = _single_holder(spec)
        if holder is not None:
            owners[job] = holder
            loads[holder] = (loads[holder][0] + costs[job], loads[holder][1])
    backward = range(len(specs) - 1, -1, -1)
    resident = _fill_chunks([job for job in backward if job in owners], sizes, chunk_bytes)
    chunks = _fill_chunks([job for job in backward if job not in owners], sizes, chunk_bytes)
    for chunk in chunks:
        owners |= longest_first(costs, sizes, loads, taken=chunk)
    return MuonPlan(
        owners=tuple(owners[job] for job in range(len(specs))),
        resident=resident,
        chunks=chunks,
        flops=tuple(flops for flops, _ in loads),
    )


def _single_holder(spec: MatrixSpec) -> int | None:
    """The rank that holds all elements while no other holds any."""
    holders = [rank for rank, count in enumerate(spec.held) if count]
    return holders[0] if len(holders) == 1 else None


def _fill_chunks(jobs: Sequence[int], sizes: Sequence[int], chunk_bytes: int) -> tuple[tuple[int, ...], ...]:
    chunks: list[list[int]] = []
    filled = 0
    for job in jobs:
        if not chunks or filled + sizes[job] > chunk_bytes:
            chunks.append([])
            filled = 0
        chunks[-1].append(job)
        filled += sizes[job]
    return tuple(tuple(chunk) for chunk in chunks)
