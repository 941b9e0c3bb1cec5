"""The program of a step: its order, and what is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.timelines import host_order
from lightning_muon.schedule.exchange import ExchangeGroup
from lightning_muon.schedule.program import COMPUTE, TRANSFER, Op, Program
from lightning_muon.schedule.simulate import simulate
from lightning_muon.schedule.step import check_step, issue_ahead
from tests.unit.schedule.specs import UNIT, plan_of, sharded, with_adamw


@pytest.fixture
def plan() -> ExchangeGroup:
    """Six matrices on two ranks, two to a bucket."""
    return plan_of(sharded([8] * 6, 2), itemsize=4)


def _program(plan: ExchangeGroup, look_ahead: int = 2) -> Program:
    return issue_ahead(with_adamw(plan.program), look_ahead)


@pytest.mark.parametrize("look_ahead", [0, 1, 2, 3])
def test_every_look_ahead_is_a_step(plan: ExchangeGroup, look_ahead: int) -> None:
    program = _program(plan, look_ahead)
    check_step(program, [plan])
    assert simulate(program, UNIT).makespan > 0


def _changed(name: str, change: Callable[[Op], Op], *ranks: int) -> Callable[[list[Op]], list[Op]]:
    return lambda ops: [change(op) if op.name == name and op.rank in ranks else op for op in ops]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ops: [op for op in ops if op.key != "1"], "is in the plan and not in the step"),
        (
            _changed("newton_schulz[1]", lambda op: replace(op, deps=op.deps[1:]), 0, 1),
            r"\bgather\[1\] of rank 0 has a result|does not depend on gather",
        ),
    ],
    ids=["bucket", "gather"],
)
def test_a_broken_step_is_refused(plan: ExchangeGroup, change: Callable[[list[Op]], list[Op]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_step({rank: change(ops) for rank, ops in _program(plan).items()}, [plan])


SHORT = {"momentum": "M", "gather": "G", "newton_schulz": "C", "scatter": "S", "update": "U", "adamw": "A"}


def _plain(num_buckets: int, num_ranks: int = 2) -> Program:
    return plan_of(sharded([10] * (num_buckets * num_ranks), num_ranks)).program


def _order(ops: list[Op]) -> str:
    return " ".join(SHORT[op.kind] + op.key for op in ops)


@pytest.mark.parametrize(
    ("look_ahead", "expected"),
    [
        (0, "M0 G0 C0 S0 U0 M1 G1 C1 S1 U1 M2 G2 C2 S2 U2 M3 G3 C3 S3 U3 A0"),
        (1, "M0 G0 A0 C0 S0 M1 G1 C1 S1 U0 M2 G2 C2 S2 U1 M3 G3 C3 S3 U2 U3"),
        (2, "M0 G0 M1 G1 A0 C0 S0 M2 G2 C1 S1 U0 M3 G3 C2 S2 U1 C3 S3 U2 U3"),
        # With more buffers for scatters, updates come later.
        (3, "M0 G0 M1 G1 M2 G2 A0 C0 S0 M3 G3 C1 S1 C2 S2 U0 C3 S3 U1 U2 U3"),
        (9, "M0 G0 M1 G1 M2 G2 M3 G3 A0 C0 S0 C1 S1 C2 S2 C3 S3 U0 U1 U2 U3"),
    ],
)
def test_gathers_come_before_adamw_and_updates_late(look_ahead: int, expected: str) -> None:
    issued = issue_ahead(with_adamw(_plain(4)), look_ahead)
    assert _order(issued[0]) == _order(issued[1]) == expected


def test_a_busy_host_starts_no_transfer() -> None:
    lanes = {"send": TRANSFER, "work": COMPUTE, "more": COMPUTE, "recv": TRANSFER}
    program = host_order({0: [Op(kind=kind, key="0", rank=0, lane=lane) for kind, lane in lanes.items()]})
    assert [op.deps for op in program[0]] == [(), (), (), ("more[0]",)]
