"""Small lists of matrices for the tests of plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from lightning_muon.schedule.muon import MuonPlan, plan_step
from lightning_muon.schedule.program import EVERY_KEY, Condition, Op, OpKind, Program
from lightning_muon.schedule.traffic import MatrixShards, MatrixSpec

# Every bucket has gradients, and what can be sent during backward was sent, and counts.
ALL_EARLY = dict.fromkeys((Condition.GRADIENTS, Condition.SENT, Condition.VALID), EVERY_KEY)


def spec(name: str, numel: int, held: Sequence[int], replica_of: Sequence[int], *, flops: int = 1) -> MatrixSpec:
    """A matrix of one column."""
    return MatrixSpec(name=name, rows=numel, cols=1, flops=flops, shards=MatrixShards(held, replica_of))


def sharded(
    numels: list[int], num_ranks: int, num_replicas: int = 1, flops: list[int] | None = None
) -> list[MatrixSpec]:
    """Matrices cut as evenly as torch.chunk does, in each replica; rank = replica * shards + shard."""
    num_shards, replica_of = num_ranks // num_replicas, grid(num_replicas, num_ranks // num_replicas)
    specs: list[MatrixSpec] = []
    for index, numel in enumerate(numels):
        part = -(-numel // num_shards)
        pieces = tuple(max(0, min(part, numel - part * shard)) for shard in range(num_shards))
        cost = flops[index] if flops is not None else numel
        specs.append(spec(f"w{index}", numel, pieces * num_replicas, replica_of, flops=cost))
    return specs


def replicated(numels: list[int], num_ranks: int) -> list[MatrixSpec]:
    """Matrices of which every rank has all."""
    return [spec(f"w{i}", numel, (numel,) * num_ranks, range(num_ranks), flops=numel) for i, numel in enumerate(numels)]


def grid(num_replicas: int, num_shards: int) -> list[int]:
    """Replica of each rank, for the order of :func:`sharded`."""
    return [replica for replica in range(num_replicas) for _ in range(num_shards)]


def plan_of(specs: list[MatrixSpec], **options: Any) -> MuonPlan:
    """The plan with one matrix per owner in a bucket."""
    return plan_step(specs, **({"itemsize": 2, "chunk_bytes": 1} | options))


def with_adamw(program: Program, size: int = 1) -> Program:
    """With an ``adamw`` op of these bytes behind each rank's ops, as an optimizer has it."""
    return {rank: [*ops, Op(kind=OpKind.ADAMW, key="0", rank=rank, bytes=size)] for rank, ops in program.items()}


@st.composite
def plans(draw: st.DrawFn) -> MuonPlan:
    """Plans of up to 20 matrices on up to four ranks, by every strategy."""
    num_replicas, num_shards = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    num_ranks = num_replicas * num_shards
    return plan_of(
        sharded(draw(st.lists(st.integers(1, 60), min_size=1, max_size=20)), num_ranks, num_replicas),
        chunk_bytes=draw(st.integers(1, 300)),
        strategy=draw(st.sampled_from(["lpt", "round_robin", "redundant"])),
    )
