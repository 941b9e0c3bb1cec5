"""The same call inside a process group and on ranks of its own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_muon.monitor.ranks import run_on_ranks, this_device
from tests.support.processes import ProcessPool


def rank_sum(start: int) -> tuple[int, int]:
    """This rank and ``start`` plus the sum of all ranks."""
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), start + int(total)


def _inside(num_ranks: int) -> tuple[int, int]:
    assert this_device() == torch.device("cpu")
    return run_on_ranks(rank_sum, 10, num_ranks=num_ranks)


def test_inside_a_process_group_each_rank_gets_its_own_result(gloo: ProcessPool) -> None:
    assert gloo.run(_inside, 3, world_size=3) == [(0, 13), (1, 13), (2, 13)]


def test_elsewhere_processes_are_started_and_rank_0_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert run_on_ranks(rank_sum, 20, num_ranks=2) == (0, 21)


def test_a_launcher_with_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="process group of 4 ranks, but 2"):
        run_on_ranks(rank_sum, 20, num_ranks=2)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_on_ranks(rank_sum, 20, num_ranks=0)
