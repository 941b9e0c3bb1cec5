"""Front end: matrices -> the program of one ParallelMuon step, with the owner of every matrix."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_muon.schedule.assign import Load, Strategy, assign_owners
from lightning_muon.schedule.buckets import fill_buckets, insert_communication, owners_of
from lightning_muon.schedule.matrix_shards import MatrixSpec, sharded_matrices
from lightning_muon.schedule.passes import choose_lanes
from lightning_muon.schedule.program import NEWTON_SCHULZ, UNASSIGNED, Op, Program

__all__ = ["MatrixSpec", "MuonPlan", "newton_schulz_ops", "plan_step"]


@dataclass(frozen=True, kw_only=True)
class MuonPlan:
    """Plan for the matrices of one exchange group, equal on all of its ranks but for the ranks in ``program``."""

    # For each matrix the ranks (in the group) that run Newton-Schulz for it, ascending. One, but for the strategy
    # `"redundant"`.
    owners: tuple[tuple[int, ...], ...]
    # The matrices of each bucket, in the order in which backward finishes them; those of a bucket travel together.
    # Buckets of matrices that lie on one rank alone come first.
    buckets: tuple[tuple[int, ...], ...]
    flops: tuple[int, ...]  # Newton-Schulz load of each rank.
    # For each rank that was asked for the ops of bucket after bucket: momentum, gather, newton_schulz, scatter, update.
    program: Program

    def fingerprint(self) -> str:
        """Digest that is equal on two ranks just if their owners, buckets, loads and order of communications are."""
        communications = [op.name for op in next(iter(self.program.values())) if op.group]
        return hashlib.sha256(repr((self.owners, self.buckets, self.flops, communications)).encode()).hexdigest()


def plan_step(
    specs: Sequence[MatrixSpec],
    *,
    num_ranks: int,
    itemsize: int,
    chunk_bytes: int,
    strategy: Strategy = "lpt",
    replica_of: Sequence[int] | None = None,
    loads: Sequence[Load] | None = None,
    key_prefix: str = "",
    keep_idle: bool = True,
    ranks: Sequence[int] | None = None,
) -> MuonPlan:
    """Assign owners and buckets, from sizes alone, so that every rank makes the same plan.

    Composes the passes ``bucket``, ``assign_owners``, ``insert_communication`` and ``choose_lanes``. The program is
    serial; :func:`~.passes.prefetch` overlaps its transfers with arithmetic.

    Args:
        specs: In the order of the forward pass; buckets are filled from the last one.
        num_ranks: Size of the exchange group.
        itemsize: Bytes of an element on the wire.
        chunk_bytes: Bound of what an average owner holds of a bucket, see :func:`~.buckets.bucket`.
        strategy: Who owns what, see :func:`~.assign.assign_owners`.
        replica_of: Replica of each rank. Sharded over all ranks: all 0 (the default). Replicated: each rank its own.
            A (replicate, shard) grid: the index along the replicate axis.
        loads: FLOPs and bytes that each rank has to do already, for example for other exchange groups.
        key_prefix: In front of the bucket number in the keys of the ops.
        keep_idle: Also list the ops of buckets that do not travel on ranks that hold nothing of them. Without them the
            lists of the ranks differ; for simulations of thousands of ranks.
        ranks: Whose ops to list, at least one; all by default. A rank that runs the plan needs only its own.
    """
    where = sharded_matrices(specs, [0] * num_ranks if replica_of is None else replica_of)
    loads = [(0, 0)] * num_ranks if loads is None else loads
    _check_arguments(num_ranks, chunk_bytes, num_replica_entries=where.num_ranks, num_loads=len(loads))
    sizes = [spec.numel * itemsize for spec in specs]
    sole_holders = where.sole_holders()
    bucketed = fill_buckets(
        newton_schulz_ops(specs),
        sizes=sizes,
        sole_holders=sole_holders,
        num_owners=1 if strategy == "redundant" else num_ranks,
        chunk_bytes=chunk_bytes,
        key_prefix=key_prefix,
    )
    assigned = assign_owners(
        bucketed,
        costs=[spec.flops for spec in specs],
        sizes=sizes,
        sole_holders=sole_holders,
        loads=loads,
        strategy=strategy,
    )
    return MuonPlan(
        owners=tuple(owners_of(assigned, len(specs))),
        buckets=tuple(op.items for op in bucketed[UNASSIGNED]),
        flops=tuple(sum(op.cost for op in assigned[rank]) for rank in range(num_ranks)),
        program=choose_lanes(
            insert_communication(
                assigned, where, itemsize=itemsize, buckets=bucketed[UNASSIGNED], keep_idle=keep_idle, ranks=ranks
            )
        ),
    )


def _check_arguments(num_ranks: int, chunk_bytes: int, *, num_replica_entries: int, num_loads: int) -> None:
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    if num_replica_entries != num_ranks:
        raise ValueError(f"replica_of has {num_replica_entries} entries for {num_ranks} ranks; give one per rank")
    if num_loads != num_ranks:
        raise ValueError(f"loads has {num_loads} entries for {num_ranks} ranks; give (FLOPs, bytes) for each rank")


def newton_schulz_ops(specs: Sequence[MatrixSpec]) -> Program:
    """One unassigned op per matrix, the last matrix first: backward finishes their gradients about in this order."""
    order = range(len(specs) - 1, -1, -1)
    return {
        UNASSIGNED: [
            Op(kind=NEWTON_SCHULZ, key=str(index), rank=UNASSIGNED, cost=specs[index].flops, items=(index,))
            for index in order
        ]
    }
