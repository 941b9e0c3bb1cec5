"""Which matrices travel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_muon.schedule.program import UNASSIGNED, Op, Program


def chunk(
    program: Program,
    *,
    sizes: Sequence[int],
    sole_holders: Sequence[int | None],
    num_owners: int,
    chunk_bytes: int,
    key_prefix: str = "",
) -> Program:
    """Merge ops of single matrices, in their order, into one op per chunk.

    A chunk is closed when it has at least one matrix for each owner and the next one would take it above
    ``num_owners * chunk_bytes``: what an *average* owner holds of a chunk is bounded by ``chunk_bytes``, but for
    matrices that are larger. Where all ranks own all matrices, ``num_owners`` is 1, and the bound is that of a chunk.

    Matrices that lie on one rank alone come first, in chunks of their own, with at most ``chunk_bytes`` per rank.

    Args:
        program: Unassigned ops of one matrix each, in the order in which backward finishes the gradients.
        sizes: Bytes of each matrix.
        sole_holders: For each matrix the rank that has all of it, or None.
        num_owners: Number of ranks that share the matrices of a chunk among them.
        chunk_bytes: See above.
        key_prefix: The key of chunk 3 is this and ``"3"``.
    """
    ops = program[UNASSIGNED]
    resident = [op for op in ops if sole_holders[op.items[0]] is not None]
    travelling = [op for op in ops if sole_holders[op.items[0]] is None]
    chunks = _by_rank(resident, sizes, sole_holders, chunk_bytes) + _by_bytes(
        travelling, sizes, num_owners, num_owners * chunk_bytes
    )
    return {UNASSIGNED: [_merge(members, f"{key_prefix}{number}") for number, members in enumerate(chunks)]}


def _by_bytes(ops: Sequence[Op], sizes: Sequence[int], least: int, most_bytes: int) -> list[list[Op]]:
    chunks: list[list[Op]] = []
    filled = 0
    for op in ops:
        size = sizes[op.items[0]]
        if not chunks or (len(chunks[-1]) >= least and filled + size > most_bytes):
            chunks.append([])
            filled = 0
        chunks[-1].append(op)
        filled += size
    return chunks


def _by_rank(
    ops: Sequence[Op], sizes: Sequence[int], sole_holders: Sequence[int | None], chunk_bytes: int
) -> list[list[Op]]:
    """Each rank fills its own sequence of chunks, so that all ranks have work in chunk after chunk."""
    chunks: list[list[Op]] = []
    filled: dict[int | None, tuple[int, int]] = {}
    for op in ops:
        matrix = op.items[0]
        rank = sole_holders[matrix]
        number, size = filled.get(rank, (0, 0))
        if size and size + sizes[matrix] > chunk_bytes:
            number, size = number + 1, 0
        filled[rank] = (number, size + sizes[matrix])
        if number == len(chunks):
            chunks.append([])
        chunks[number].append(op)
    return chunks


def _merge(ops: Sequence[Op], key: str) -> Op:
    items = tuple(item for op in ops for item in op.items)
    return replace(ops[0], key=key, cost=sum(op.cost for op in ops), items=items)
