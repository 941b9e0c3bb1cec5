"""The name of an op."""

from __future__ import annotations

from lightning_muon.schedule.program import Op


def test_an_op_is_named_by_its_kind_and_key() -> None:
    assert Op(kind="gather", key="a3", rank=1).name == "gather[a3]"
