import pytest

from lightning_muon import ParallelMuonStrategy
from lightning_muon.sharding.mode import ShardingMode
from lightning_muon.sharding.modes import MODES, SingleProcess, check_mode


def test_every_mode_has_the_name_that_users_call_it() -> None:
    assert list(MODES) == ["fsdp", "zero2", "ddp", "none"]
    assert all(mode.name == name and issubclass(mode, ShardingMode) for name, mode in MODES.items())
    assert [name for name, mode in MODES.items() if mode.shards_weights] == ["fsdp"]


class _Fourth(SingleProcess):
    """Another mode, in a file of its own."""

    name = "fourth"
    takes = frozenset({"wrap_policy"})


def test_another_mode_needs_no_change_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "fourth", _Fourth)
    ParallelMuonStrategy(sharding="fourth", wrap_policy=())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_bytes=5 means nothing with sharding='fourth'"):
        ParallelMuonStrategy(sharding="fourth", bucket_bytes=5)  # type: ignore[arg-type]


def test_an_unknown_mode_is_an_error_that_lists_the_known_ones() -> None:
    check_mode("zero2")
    with pytest.raises(ValueError, match=r"one of \('fsdp', 'zero2', 'ddp', 'none'\), got 'zero3'"):
        check_mode("zero3")
