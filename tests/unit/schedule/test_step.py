"""The program of a step: its order, what its branches run, and what is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.timelines import host_order
from lightning_muon.schedule.muon import MuonPlan
from lightning_muon.schedule.program import (
    COMPUTE,
    EVERY_KEY,
    IN_BACKWARD,
    TRANSFER,
    Condition,
    Facts,
    Op,
    OpKind,
    Program,
    branch,
)
from lightning_muon.schedule.simulate import simulate
from lightning_muon.schedule.step import AddedOps, prefetch, step_program
from lightning_muon.schedule.validate import check_step
from tests.unit.schedule.specs import UNIT, plan_of, sharded, with_adamw

ALL_IN_STEP: Facts = {Condition.GRADIENTS: EVERY_KEY}


@pytest.fixture
def plan() -> MuonPlan:
    """Six matrices on two ranks, two to a bucket."""
    return plan_of(sharded([8] * 6, 2), itemsize=4)


def _program(plan: MuonPlan, look_ahead: int = 2, *, is_late: bool = False) -> Program:
    return step_program(with_adamw(plan.program), look_ahead=look_ahead, is_late=is_late)


def _names(program: Program, facts: Facts) -> list[str]:
    return [op.name for op in branch(program, facts)[0]]


@pytest.mark.parametrize("look_ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("is_late", [False, True])
def test_every_branch_is_a_step(plan: MuonPlan, look_ahead: int, is_late: bool) -> None:
    program = _program(plan, look_ahead, is_late=is_late)
    check_step(program, [plan])
    assert simulate(branch(program, ALL_IN_STEP), UNIT).makespan > 0


def test_a_bucket_without_gradients_does_not_run(plan: MuonPlan) -> None:
    names = _names(_program(plan), {Condition.GRADIENTS: {"0", "2"}})
    assert [name for name in names if "[1]" in name] == []
    assert sum("update" in name for name in names) == 2


def test_adamw_follows_a_deferred_check(plan: MuonPlan) -> None:
    names = _names(_program(plan), ALL_IN_STEP)
    assert names.index("adamw[0]") < names.index("newton_schulz[0]")
    assert "check[]" not in names
    names = _names(_program(plan), {**ALL_IN_STEP, Condition.DEFERRED: EVERY_KEY})
    place = names.index("check[]")
    assert names[place : place + 3] == ["check[]", "adamw[0 after check]", "update[0]"]
    assert _names(_program(plan, is_late=True), ALL_IN_STEP)[place - 1 : place + 1] == ["scatter[1]", "adamw[0]"]


def test_added_ops_have_their_places(plan: MuonPlan) -> None:
    def added(rank: int) -> AddedOps:
        common = {"rank": rank, "lane": TRANSFER, "group": (0, 1)}
        return AddedOps(
            first=[Op(kind=OpKind.REDUCE_SCATTER, key="p0", phase=IN_BACKWARD, **common)],
            after={"update[1]": [Op(kind=OpKind.ALL_GATHER, key="p0", deps=("update[1]",), **common)]},
            last=[Op(kind=OpKind.ALL_GATHER, key="p1", deps=("adamw[0]",), **common)],
        )

    canonical = with_adamw(plan.program)
    program = step_program(canonical, look_ahead=2, is_late=True, added={rank: added(rank) for rank in (0, 1)})
    check_step(program, [plan])
    names = _names(program, ALL_IN_STEP)
    assert (names[0], names[-1]) == ("reduce_scatter[p0]", "all_gather[p1]")
    assert names[names.index("update[1]") + 1] == "all_gather[p0]"
    with pytest.raises(ValueError, match=r"behind update\[9\], which is not in the step"):
        step_program(canonical, look_ahead=2, added={0: AddedOps(after={"update[9]": []})})


@pytest.mark.parametrize("is_late", [False, True])
def test_an_op_comes_in_front_of_the_first_that_needs_it(plan: MuonPlan, is_late: bool) -> None:
    needed = [
        (Op(kind="decode", key="a", rank=0), {"momentum[1]"}),
        (Op(kind="decode", key="b", rank=0), {"adamw[0]", "momentum[2]"}),
        (Op(kind="decode", key="c", rank=0), {"adamw[0]", "momentum[0]"}),
        (Op(kind="decode", key="d", rank=0), {"momentum[2]"}),
    ]
    canonical = with_adamw({0: plan.program[0]})

    def program(number: int) -> list[str]:
        added = AddedOps(needed=needed[:number])
        made = step_program(canonical, look_ahead=2, is_late=is_late, added={0: added})
        check_step(made, [replace(plan, program={0: plan.program[0]})], is_whole=False)
        for facts in (ALL_IN_STEP, ALL_IN_STEP | {Condition.DEFERRED: EVERY_KEY}):
            assert [name for name in _names(made, facts) if "decode" in name] == [op.name for op, _ in needed[:number]]
        return _names(made, ALL_IN_STEP)

    names = program(2)
    assert names[names.index("momentum[1]") - 1] == "decode[a]"
    assert names[names.index("momentum[2]" if is_late else "adamw[0]") - 1] == "decode[b]"
    names = program(4)
    assert names[:3] == ["decode[a]", "decode[b]", "decode[c]"]
    assert names[names.index("momentum[2]") - 1] == "decode[d]"
    with pytest.raises(ValueError, match=r"decode\[a\] is needed by \['momentum\[9\]'\]"):
        step_program(canonical, look_ahead=2, added={0: AddedOps(needed=[(needed[0][0], {"momentum[9]"})])})


def _check_late(ops: list[Op]) -> list[Op]:
    return [op for op in ops if op.name != "check[]"] + [op for op in ops if op.name == "check[]"]


def _changed(name: str, change: Callable[[Op], Op], *ranks: int) -> Callable[[list[Op]], list[Op]]:
    return lambda ops: [change(op) if op.name == name and op.rank in ranks else op for op in ops]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_check_late, "changes parameters before the step has waited for check"),
        (_changed("adamw[0 after check]", lambda op: replace(op, when=()), 0, 1), "each must run once"),
        (
            _changed("newton_schulz[1]", lambda op: replace(op, deps=op.deps[1:]), 0, 1),
            r"\bgather\[1\] of rank 0 has a result|does not depend on gather",
        ),
    ],
    ids=["check", "adamw", "gather"],
)
def test_a_broken_step_is_refused(plan: MuonPlan, change: Callable[[list[Op]], list[Op]], message: str) -> None:
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
    issued = prefetch(with_adamw(_plain(4)), look_ahead)
    assert _order(issued[0]) == _order(issued[1]) == expected


def test_a_buffer_is_waited_for_before_it_is_filled_again() -> None:
    deps = {op.name: op.deps for op in prefetch(_plain(5), 3)[0]}
    assert deps["momentum[2]"] == ()
    assert deps["momentum[3]"] == ("newton_schulz[0]",)
    assert deps["newton_schulz[2]"] == ("gather[2]",)
    assert deps["newton_schulz[3]"] == ("gather[3]", "update[0]")


def test_lists_of_several_exchange_groups_are_one_sequence() -> None:
    # The second group has one rank: nothing travels.
    groups = [plan_of(sharded([10] * ranks, ranks), key_prefix=prefix) for prefix, ranks in (("a", 2), ("b", 1))]
    issued = prefetch({0: [op for group in groups for op in group.program[0]]}, 1)[0]
    assert _order(issued) == "Ma0 Ga0 Ca0 Sa0 Mb0 Cb0 Ua0 Ub0"
    assert next(op for op in issued if op.name == "momentum[b0]").deps == ("newton_schulz[a0]",)


def test_prefetch_refuses_what_it_cannot_place() -> None:
    with pytest.raises(ValueError, match=r"where to put forward\[0\] of rank 3"):
        prefetch({3: [Op(kind="forward", key="0", rank=3)]}, 1)


def test_a_busy_host_starts_no_transfer() -> None:
    lanes = {"send": TRANSFER, "work": COMPUTE, "more": COMPUTE, "recv": TRANSFER}
    program = host_order({0: [Op(kind=kind, key="0", rank=0, lane=lane) for kind, lane in lanes.items()]})
    assert [op.deps for op in program[0]] == [(), (), (), ("more[0]",)]
