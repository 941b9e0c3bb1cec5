"""Small programs and a machine with round numbers, for the tests of graph, simulator and validator."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.program import COMPUTE, TRANSFER, Op, Program

# A FLOP takes a second, and so does a byte on the wire; memory traffic is free.
UNIT = CostModel(flops_per_second=1.0, memory_bytes_per_second=1e30, bandwidth=(1.0,))


def compute(name: str, cost: int, *deps: str, rank: int = 0, memory: int = 0) -> Op:
    """An op of some seconds on the compute lane, key 0."""
    return Op(kind=name, key="0", rank=rank, cost=cost, deps=deps, memory=memory)


def collective(name: str, size: int, *deps: str, rank: int = 0, group: tuple[int, ...] = (), memory: int = 0) -> Op:
    """An op of some seconds on the transfer lane."""
    return Op(kind=name, key="0", rank=rank, bytes=size, lane=TRANSFER, deps=deps, group=group, memory=memory)


@st.composite
def programs(draw: st.DrawFn, max_ranks: int = 3, max_ops: int = 10) -> Program:
    """Programs that run: on each rank ops of its own, with dependencies on earlier ones, and common collectives."""
    num_ranks = draw(st.integers(1, max_ranks))
    program: Program = {rank: [] for rank in range(num_ranks)}
    everyone = tuple(range(num_ranks))
    for number in range(draw(st.integers(1, max_ops))):
        is_collective = draw(st.booleans())
        for rank, ops in program.items():
            before = [op.name for op in ops]
            deps = draw(st.lists(st.sampled_from(before), max_size=2, unique=True)) if before else []
            ops.append(
                Op(
                    kind="all" if is_collective else "own",
                    key=str(number),
                    rank=rank,
                    cost=0 if is_collective else draw(st.integers(0, 5)),
                    bytes=draw(st.integers(0, 5)) if is_collective else 0,
                    lane=TRANSFER if is_collective else COMPUTE,
                    deps=tuple(deps),
                    memory=draw(st.integers(0, 9)),
                    group=everyone if is_collective else (),
                )
            )
    return program
