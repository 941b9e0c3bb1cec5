"""Lanes, order of issue, and where AdamW goes."""

from __future__ import annotations

import pytest

from lightning_muon.schedule.memory import peak_memory
from lightning_muon.schedule.muon import plan_step
from lightning_muon.schedule.passes import choose_lanes, host_order, prefetch, with_adamw
from lightning_muon.schedule.program import COMPUTE, TRANSFER, Op, Program
from tests.unit.schedule.specs import sharded

SHORT = {"momentum": "M", "gather": "G", "newton_schulz": "C", "scatter": "S", "update": "U", "adamw": "A"}


def _program(num_buckets: int, num_ranks: int = 2) -> Program:
    specs = sharded([10] * (num_buckets * num_ranks), num_ranks)
    return plan_step(specs, num_ranks=num_ranks, itemsize=2, chunk_bytes=1).program


def _order(ops: list[Op]) -> str:
    return " ".join(SHORT[op.kind] + op.key for op in ops)


def test_without_look_ahead_the_program_stays_serial() -> None:
    program = _program(2)
    assert prefetch(program, 0) == program
    assert _order(program[0]) == "M0 G0 C0 S0 U0 M1 G1 C1 S1 U1"


@pytest.mark.parametrize(
    ("look_ahead", "expected"),
    [
        (1, "M0 G0 A0 C0 S0 M1 G1 C1 S1 U0 M2 G2 C2 S2 U1 M3 G3 C3 S3 U2 U3"),
        (2, "M0 G0 M1 G1 A0 C0 S0 M2 G2 C1 S1 U0 M3 G3 C2 S2 U1 C3 S3 U2 U3"),
        (9, "M0 G0 M1 G1 M2 G2 M3 G3 A0 C0 S0 C1 S1 U0 C2 S2 U1 C3 S3 U2 U3"),
    ],
)
def test_the_first_gathers_are_issued_before_adamw_and_the_next_after_an_update(look_ahead: int, expected: str) -> None:
    issued = prefetch(with_adamw(_program(4), [7, 8]), look_ahead)
    assert _order(issued[0]) == _order(issued[1]) == expected
    assert [op.bytes for op in issued[1] if op.kind == "adamw"] == [8]


def test_with_more_scatter_buffers_updates_come_later() -> None:
    issued = prefetch(_program(5), 2, scatter_buffers=3)[0]
    assert _order(issued) == "M0 G0 M1 G1 C0 S0 M2 G2 C1 S1 M3 G3 C2 S2 U0 M4 G4 C3 S3 U1 C4 S4 U2 U3 U4"
    deps = {op.name: op.deps for op in issued}
    assert deps["newton_schulz[2]"] == ("gather[2]",)
    assert deps["newton_schulz[3]"] == ("gather[3]", "update[0]")
    with pytest.raises(ValueError, match="scatter_buffers must be at least 2, got 1"):
        prefetch(_program(2), 1, scatter_buffers=1)


def test_scatter_buffers_are_lowered_with_the_look_ahead() -> None:
    program = _program(8)
    most = peak_memory(prefetch(program, 3, scatter_buffers=3)).bytes
    assert prefetch(program, 4, memory_bytes=most, scatter_buffers=4) == prefetch(program, 3, scatter_buffers=3)
    assert prefetch(program, 4, memory_bytes=most - 1, scatter_buffers=4) == prefetch(program, 2)


def test_a_buffer_is_waited_for_before_it_is_filled_again() -> None:
    deps = {op.name: op.deps for op in prefetch(_program(4), 2)[0]}
    assert deps["momentum[1]"] == ()
    assert deps["momentum[3]"] == ("newton_schulz[1]",)
    assert deps["newton_schulz[1]"] == ("gather[1]",)
    assert deps["newton_schulz[3]"] == ("gather[3]", "update[1]")


def test_lists_of_several_exchange_groups_are_one_sequence_of_buckets() -> None:
    ops = [
        op
        for prefix, num_ranks in (("a", 2), ("b", 1))
        for op in plan_step(
            sharded([10] * num_ranks, num_ranks), num_ranks=num_ranks, itemsize=2, chunk_bytes=1, key_prefix=prefix
        ).program[0]
    ]
    issued = prefetch({0: ops}, 1)[0]
    # The second group has one rank: nothing travels.
    assert _order(issued) == "Ma0 Ga0 Ca0 Sa0 Mb0 Cb0 Ua0 Ub0"
    assert next(op for op in issued if op.name == "momentum[b0]").deps == ("newton_schulz[a0]",)


def test_the_look_ahead_is_lowered_until_the_buffers_fit() -> None:
    program = _program(6)
    peaks = [peak_memory(prefetch(program, look_ahead)).bytes for look_ahead in (1, 2, 3)]
    assert peaks == sorted(set(peaks))
    assert prefetch(program, 5, memory_bytes=peaks[1]) == prefetch(program, 2)
    assert prefetch(program, 5, memory_bytes=peaks[1] - 1) == prefetch(program, 1)
    with pytest.raises(ValueError, match=rf"rank 0 needs {peaks[0]} bytes of buffers at \w+\[\d\] with look_ahead=1"):
        prefetch(program, 5, memory_bytes=peaks[0] - 1)


def test_prefetch_refuses_what_it_cannot_place() -> None:
    with pytest.raises(ValueError, match="look_ahead must be at least 0, got -1"):
        prefetch({}, -1)
    with pytest.raises(ValueError, match=r"where to put forward\[0\] of rank 3"):
        prefetch({3: [Op(kind="forward", key="0", rank=3)]}, 1)


def test_a_busy_host_starts_no_transfer() -> None:
    ops = [Op(kind=kind, key="0", rank=0) for kind in ("send", "work", "more", "recv")]
    program = host_order(choose_lanes({0: ops}, transfer_kinds=("send", "recv")))
    assert [op.lane for op in program[0]] == [TRANSFER, COMPUTE, COMPUTE, TRANSFER]
    assert [op.deps for op in program[0]] == [(), (), (), ("more[0]",)]
