"""What `lightning-muon doctor` says of this machine, of wrong versions, and of links that do not work."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

from lightning_muon.cli import doctor
from lightning_muon.cli import main as command
from tests.support.processes import ProcessPool


def _links(replicate_size: int) -> list[tuple[Any, ...]]:
    links = doctor.measure_links(replicate_size, 0.1)
    assert all(each.latency > 0 and each.bandwidth > 0 for each in links)
    return [(each.axis, each.num_ranks, each.kind, each.is_right) for each in links]


@pytest.mark.parametrize(
    ("num_ranks", "replicate_size", "axes"),
    [(1, 1, []), (3, 1, [("shard", 3)]), (4, 2, [("shard", 2), ("replicate", 2)]), (2, 2, [("replicate", 2)])],
)
def test_each_axis_is_measured(gloo: ProcessPool, num_ranks: int, replicate_size: int, axes: Any) -> None:
    kinds = ("all-to-all", "all-reduce")
    expected = [(*axis, kind, True) for axis in axes for kind in kinds]
    assert gloo.run(_links, replicate_size, world_size=num_ranks) == [expected] * num_ranks


def _links_that_lose_a_number() -> list[bool]:
    exchange = doctor._all_to_all

    def broken(sent: torch.Tensor, group: Any) -> torch.Tensor:
        got = exchange(sent, group)
        return got * 0 if group.rank == 1 else got

    doctor._all_to_all = broken
    try:
        return [each.is_right for each in doctor.measure_links(1, 0.1)]
    finally:
        doctor._all_to_all = exchange


def test_wrong_numbers_on_one_rank_are_known_to_all(gloo: ProcessPool) -> None:
    assert gloo.run(_links_that_lose_a_number, world_size=2) == [[False, True]] * 2


def _doctor(*words: str) -> Any:
    try:
        command.main(["doctor", *words])
    except SystemExit as end:
        return end.code
    return 0


def test_packages_devices_and_network_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert _doctor("--seconds", "0") == 0
    text = capsys.readouterr().out
    assert f"torch {torch.__version__.partition('+')[0]}" in " ".join(text.split())
    assert all(word in text for word in ("cores", "gloo", "interfaces", "Nothing is broken."))


def test_a_version_that_is_not_supported_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "2.9.1" if name == "torch" else known(name))
    assert _doctor("--seconds", "0") == 1
    assert "broken: torch 2.9.1 is installed; this package is tested with <2.15,>=2.11" in capsys.readouterr().out


def test_a_self_test_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("connection refused")

    monkeypatch.setattr(doctor, "run_on_ranks", refuse)
    assert _doctor("--ranks", "3") == 1
    assert "broken: the self-test of 3 ranks failed: connection refused" in capsys.readouterr().out


def test_ranks_must_be_a_multiple_of_the_replicas() -> None:
    assert "3 ranks are no multiple of --replicate-size 2" in str(_doctor("--ranks", "3", "--replicate-size", "2"))


def rank_sum(start: int) -> tuple[int, int]:
    """This rank and ``start`` plus the sum of all ranks."""
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), start + int(total)


def _inside(num_ranks: int) -> tuple[int, int]:
    assert doctor.this_device() == torch.device("cpu")
    return doctor.run_on_ranks(rank_sum, 10, num_ranks=num_ranks)


def test_inside_a_process_group_each_rank_gets_its_own_result(gloo: ProcessPool) -> None:
    assert gloo.run(_inside, 3, world_size=3) == [(0, 13), (1, 13), (2, 13)]


def test_elsewhere_processes_are_started_and_rank_0_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    # Started as mp.spawn starts them, from a process that has imported torch.
    monkeypatch.setattr(doctor.mp, "spawn", partial(start_processes, start_method="forkserver"))
    assert doctor.run_on_ranks(rank_sum, 20, num_ranks=2) == (0, 21)


def test_a_launcher_with_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="process group of 4 ranks, but 2"):
        doctor.run_on_ranks(rank_sum, 20, num_ranks=2)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        doctor.run_on_ranks(rank_sum, 20, num_ranks=0)
