"""The order of issue, where AdamW goes, buffers, and a busy host."""

from __future__ import annotations

import pytest

from lightning_muon.schedule.passes import host_order, prefetch
from lightning_muon.schedule.program import COMPUTE, TRANSFER, Op, Program
from tests.unit.schedule.specs import plan_of, sharded, with_adamw

SHORT = {"momentum": "M", "gather": "G", "newton_schulz": "C", "scatter": "S", "update": "U", "adamw": "A"}


def _program(num_buckets: int, num_ranks: int = 2) -> Program:
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
    issued = prefetch(with_adamw(_program(4)), look_ahead)
    assert _order(issued[0]) == _order(issued[1]) == expected


def test_a_buffer_is_waited_for_before_it_is_filled_again() -> None:
    deps = {op.name: op.deps for op in prefetch(_program(5), 3)[0]}
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
