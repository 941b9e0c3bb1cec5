"""Refuse programs that run but are no optimizer step: a matrix left out or done twice, an op behind the wrong one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_muon.schedule.counts import Owners
from lightning_muon.schedule.kinds import GATHER, MOMENTUM, NEWTON_SCHULZ, SCATTER, STEP_KINDS, UPDATE
from lightning_muon.schedule.program import Op, Program

_MAY_BE_ABSENT = (GATHER, SCATTER)
# Which kind works on the result of an op, that of its own chunk only. (Other dependencies are those of buffers.)
_HANDED_TO = {MOMENTUM: (NEWTON_SCHULZ,), GATHER: (NEWTON_SCHULZ,), NEWTON_SCHULZ: (UPDATE,), SCATTER: (UPDATE,)}


def validate_step(program: Program, owners: Sequence[Owners], *, is_whole: bool = True) -> None:
    """Check that a program orthogonalizes each matrix once on each of its owners, and that nothing is skipped.

    A matrix is in one chunk, and in the Newton-Schulz of this chunk on its owners only. On each rank a chunk has one
    momentum, at most one gather, one Newton-Schulz, at most one scatter, and one update, each of which depends on the
    one before; no result is used by two chunks.

    Args:
        program: With all ranks of the exchange group; ops of other kinds may be anywhere.
        owners: For each matrix the ranks that own it, ascending.
        is_whole: Whether the program has all ranks; otherwise other owners are taken to do their part.

    Raises:
        ValueError: Names the op and its rank.
    """
    chunk_of = _chunks(program, len(owners))
    for rank, ops in program.items():
        _check_rank(rank, ops)
    _check_owners(program, owners, chunk_of, is_whole=is_whole)


def _chunks(program: Program, num_matrices: int) -> list[str]:
    """Key of the chunk of each matrix."""
    items_of: dict[str, tuple[Op, tuple[int, ...]]] = {}
    for ops in program.values():
        for op in ops:
            if op.kind in STEP_KINDS and op.kind != NEWTON_SCHULZ:
                first, items = items_of.setdefault(op.key, (op, op.items))
                # Ranks share the tuples of a plan, so this is quick.
                if op.items is not items and op.items != items:
                    raise ValueError(
                        f"{_where(op)} works on the matrices {_some(op.items)} and {_where(first)} on {_some(items)}; "
                        "all ops of a chunk but Newton-Schulz have all matrices of the chunk"
                    )
    chunk_of: list[str | None] = [None] * num_matrices
    for key, (op, items) in items_of.items():
        for matrix in items:
            if not 0 <= matrix < num_matrices:
                raise ValueError(f"{_where(op)} works on matrix {matrix}, but there are {num_matrices} matrices")
            if chunk_of[matrix] is not None:
                raise ValueError(
                    f"{_where(op)} works on matrix {matrix}, which chunk {chunk_of[matrix]} has too; a matrix is in "
                    "one chunk, once"
                )
            chunk_of[matrix] = key
    if None in chunk_of:
        raise ValueError(f"matrix {chunk_of.index(None)} is in no chunk, so no op of any rank updates it")
    return [key for key in chunk_of if key is not None]


def _check_rank(rank: int, ops: Sequence[Op]) -> None:
    """One op of each kind per chunk, each behind the one before, and nobody else's."""
    chunks: dict[str, dict[str, Op]] = {}
    for op in ops:
        if op.kind in STEP_KINDS and chunks.setdefault(op.key, {}).setdefault(op.kind, op) is not op:
            raise ValueError(f"{op.name} of rank {rank} is there twice; a chunk has one op of each kind")
    results = {
        op.name: (kind, key) for key, chunk in chunks.items() for kind, op in chunk.items() if kind in _HANDED_TO
    }
    for key, chunk in chunks.items():
        before: Op | None = None
        for kind in STEP_KINDS:
            op = chunk.get(kind)
            if op is not None:
                _check_deps(op, before, results)
                before = op
            elif kind not in _MAY_BE_ABSENT:
                other = next(iter(chunk.values()))
                raise ValueError(f"rank {rank} has {other.name} but no {kind}[{key}]; each chunk needs one")


def _check_deps(op: Op, before: Op | None, results: Mapping[str, tuple[str, str]]) -> None:
    """The op waits for the one before it in its chunk, and uses no result of other chunks.

    Args:
        op: Of a chunk.
        before: The op before it in the chunk.
        results: Name of an op -> its kind and key.
    """
    if before is not None and before.name not in op.deps:
        raise ValueError(f"{_where(op)} does not depend on {before.name}, whose result it works on; add it to its deps")
    for name in op.deps:
        kind, key = results.get(name, ("", op.key))
        if key != op.key and op.kind in _HANDED_TO[kind]:
            raise ValueError(
                f"{_where(op)} depends on {name}, whose result is for {op.kind}[{key}] alone; a result is used by its "
                "own chunk, once"
            )


def _check_owners(program: Program, owners: Sequence[Owners], chunk_of: Sequence[str], *, is_whole: bool) -> None:
    """Every matrix in one Newton-Schulz on each of its owners, and nowhere else."""
    found: list[Owners] = [()] * len(owners)
    for items, users in _by_items(op for ops in program.values() for op in ops if op.kind == NEWTON_SCHULZ):
        first, ranks = users[0], tuple(sorted(op.rank for op in users))
        for matrix in items:
            if not 0 <= matrix < len(owners) or chunk_of[matrix] != first.key:
                raise ValueError(f"{_where(first)} works on matrix {matrix}, which is not in chunk {first.key}")
            found[matrix] = ranks if not found[matrix] else tuple(sorted((*found[matrix], *ranks)))
    for matrix, (ranks, wanted) in enumerate(zip(found, owners, strict=True)):
        if not ranks and not wanted:
            raise ValueError(f"matrix {matrix} has no owner, so newton_schulz[{chunk_of[matrix]}] leaves it out")
        if not is_whole:
            wanted = tuple(rank for rank in wanted if rank in program)
        if ranks is wanted or ranks == wanted:
            continue
        name = f"newton_schulz[{chunk_of[matrix]}]"
        for rank in sorted({*ranks, *wanted}):
            if ranks.count(rank) != wanted.count(rank):
                raise ValueError(
                    f"{name} of rank {rank} has matrix {matrix} {ranks.count(rank)} times, but its owners are the "
                    f"ranks {_some(wanted)}; each owner has it once and no other rank does"
                )


def _by_items(ops: Iterable[Op]) -> Iterable[tuple[tuple[int, ...], list[Op]]]:
    """Ops of one chunk that share a tuple of matrices (all ranks, where every rank owns everything)."""
    users: dict[tuple[int, str], list[Op]] = {}
    for op in ops:
        if op.items:
            users.setdefault((id(op.items), op.key), []).append(op)
    return [(listed[0].items, listed) for listed in users.values()]


def _some(numbers: tuple[int, ...]) -> str:
    return f"{numbers[:8]}" if len(numbers) <= 8 else f"{numbers[:8]} and {len(numbers) - 8} more"


def _where(op: Op) -> str:
    return f"{op.name} of rank {op.rank}"
