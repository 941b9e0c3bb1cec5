"""Checks of programs before any rank runs them; errors name the op."""

from __future__ import annotations

from collections import deque

from lightning_muon.schedule.graph import build_graph, where
from lightning_muon.schedule.program import Program


def validate(program: Program) -> None:
    """Check that a program, with all ranks of every group, can run; a ``ValueError`` names the op and its rank.

    Names must be unique, ``deps`` exist, results be used, and no op wait forever: all ranks of a communication must
    reach it, in one order.
    """
    for ops in program.values():
        used = {name for op in ops for name in op.deps}
        for op in ops:
            if op.memory and op.name not in used:
                raise ValueError(f"{where(op)} has a result of {op.memory} bytes that nothing uses")
    # Raises for unknown dependencies, equal names, wrong groups, and ops that can never begin.
    deque(build_graph(program).order(), maxlen=0)
