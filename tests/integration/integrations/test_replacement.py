"""A checkpoint is where the one before it was, or that one is still there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_muon.comm.agreement import on_first_rank, together
from lightning_muon.integrations.replacement import remove, replacing, write_shards
from tests.support.processes import ProcessPool


def _replace(path: str, value: int, *, whole: bool, unfinished: bool = False, fails: bool = False) -> None:
    """Write ``value``, with a tensor of its own on each rank."""
    with replacing(Path(path), whole=whole) as (draft,):
        if whole:
            on_first_rank(lambda: torch.save(value, draft))
        elif not unfinished:
            content = {"value": value, f"of_rank_{dist.get_rank()}": torch.ones(3)}
            # What one rank alone cannot pickle.
            write_shards(content | ({"hook": lambda: None} if fails and dist.get_rank() == 1 else {}), draft)
        if fails and whole:
            together(lambda: 1 // (1 - dist.get_rank()))


def _read(path: Path) -> int:
    if path.is_file():
        return torch.load(path)
    state = {"value": 0}
    torch.distributed.checkpoint.load(state, checkpoint_id=path, no_dist=True)
    return state["value"]


def _names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir())


_SHARDS = [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize("whole", [True, False])
def test_what_fails_on_one_rank_leaves_the_checkpoint_that_was_there(
    gloo: ProcessPool, tmp_path: Path, whole: bool
) -> None:
    path = tmp_path / "sub" / "checkpoint"
    gloo.run(_replace, str(path), 1, whole=whole, world_size=2)
    with pytest.raises(Exception, match=r"ZeroDivisionError|could not be written") as failed:
        gloo.run(_replace, str(path), 2, whole=whole, fails=True, world_size=2)
    assert sorted(failed.value.failures) == [0, 1]
    assert _names(path.parent) == ["checkpoint"] and _read(path) == 1
    gloo.run(_replace, str(path), 3, whole=whole, world_size=2)
    assert _names(path.parent) == ["checkpoint"] and _read(path) == 3


@pytest.mark.parametrize("whole", [True, False])
def test_the_other_format_is_replaced(gloo: ProcessPool, tmp_path: Path, whole: bool) -> None:
    path = tmp_path / "checkpoint"
    gloo.run(_replace, str(path), 1, whole=not whole, world_size=2)
    gloo.run(_replace, str(path), 2, whole=whole, world_size=2)
    assert _read(path) == 2 and path.is_file() == whole
    assert _names(tmp_path) == ["checkpoint"]


def test_files_of_others_stay_in_the_directory_and_old_shards_do_not(gloo: ProcessPool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    gloo.run(_replace, str(path), 1, whole=False, world_size=3)
    assert "__2_0.distcp" in _names(path)
    (path / "tokenizer.json").write_text("mine")
    (path / "hub").mkdir()
    (path / "hub" / "weights.bin").write_text("mine, too")
    gloo.run(_replace, str(path), 2, whole=False, world_size=2)
    assert _names(path) == [*_SHARDS, "hub", "tokenizer.json"] and _read(path) == 2
    assert (path / "tokenizer.json").read_text() == "mine"
    assert (path / "hub" / "weights.bin").read_text() == "mine, too"
    gloo.expect_error_on_all_ranks(
        _replace, str(path), 3, whole=True, exception=IsADirectoryError, match=r"\(hub, tokenizer.json\)", world_size=2
    )
    assert _names(path) == [*_SHARDS, "hub", "tokenizer.json"] and _read(path) == 2


def test_a_directory_of_others_is_refused(gloo: ProcessPool, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    gloo.expect_error_on_all_ranks(
        _replace, str(tmp_path), 1, whole=False, exception=IsADirectoryError, match="other files", world_size=2
    )
    assert _names(tmp_path) == ["notes.txt"]


def test_a_draft_that_is_not_there_leaves_the_directory_in_its_place(gloo: ProcessPool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    gloo.run(_replace, str(path), 1, whole=False, world_size=2)
    with pytest.raises(Exception, match=r"\.checkpoint\.new"):
        gloo.run(_replace, str(path), 2, whole=False, unfinished=True, world_size=2)
    assert _names(tmp_path) == ["checkpoint"] and _read(path) == 1


def _killed_before(path: Path) -> None:
    """As a process leaves it that is killed between the two renames."""
    path.rename(path.with_name(".checkpoint.old"))
    path.with_name(".checkpoint.new").mkdir()


def _killed_after(path: Path) -> None:
    """As a process leaves it that is killed before it moves the files of others."""
    old = path.with_name(".checkpoint.old")
    old.mkdir()
    (path / "notes.txt").rename(old / "notes.txt")
    (old / "__0_0.distcp").write_text("the shards before")


@pytest.mark.parametrize("killed", [_killed_before, _killed_after])
@pytest.mark.parametrize("fails", [True, False])
def test_what_a_killed_process_leaves_is_put_in_order(
    gloo: ProcessPool, tmp_path: Path, killed: Callable[[Path], None], fails: bool
) -> None:
    path = tmp_path / "checkpoint"
    gloo.run(_replace, str(path), 1, whole=False, world_size=2)
    (path / "notes.txt").write_text("mine")
    killed(path)
    options: dict[str, Any] = {"whole": False, "world_size": 2}
    if fails:
        with pytest.raises(Exception, match="could not be written"):
            gloo.run(_replace, str(path), 2, fails=True, **options)
    else:
        gloo.run(_replace, str(path), 2, **options)
    assert _names(tmp_path) == ["checkpoint"] and _read(path) == (1 if fails else 2)
    assert _names(path) == [*_SHARDS, "notes.txt"]


def test_a_link_stays_a_link(gloo: ProcessPool, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "disk" / "checkpoint")
    for value in (1, 2):
        gloo.run(_replace, str(link), value, whole=False, world_size=2)
        assert link.is_symlink() and _names(tmp_path / "disk") == ["checkpoint"] and _read(link) == value


def test_what_is_not_there_need_not_be_removed(tmp_path: Path) -> None:
    remove(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    (tmp_path / "directory" / "inner").mkdir(parents=True)
    remove(tmp_path / "file")
    remove(tmp_path / "directory")
    assert _names(tmp_path) == []
