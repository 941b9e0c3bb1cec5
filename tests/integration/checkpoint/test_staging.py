"""A checkpoint is where the one before it was, or that one is still there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_muon.checkpoint.loading import newest_first
from lightning_muon.checkpoint.saving import write_shards
from lightning_muon.checkpoint.staging import discard, last_written, replacing
from lightning_muon.comm.agreement import on_first_rank
from tests.support.processes import ProcessPool


def _replace(path: str, value: int, *, whole: bool, fails: bool = False) -> None:
    """Write ``value``, with a tensor of its own on each rank; rank 1 may have what cannot be pickled."""
    with replacing(Path(path), whole=whole) as draft:
        if whole:
            on_first_rank(lambda: torch.save(value, draft))
        else:
            own = (lambda: None) if fails and dist.get_rank() == 1 else torch.ones(3)
            write_shards({"value": value, f"of_rank_{dist.get_rank()}": own}, draft, {})


def _read(path: Path) -> int:
    if path.is_file():
        return torch.load(path)
    state = {"value": 0}
    torch.distributed.checkpoint.load(state, checkpoint_id=path, no_dist=True)
    return state["value"]


def _names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir())


_SHARDS = [".metadata", "__0_0.distcp", "__1_0.distcp"]
_FEW_FILES = _SHARDS[:2]


def test_either_format_takes_the_place_of_the_other_unless_a_rank_fails(gloo: ProcessPool, tmp_path: Path) -> None:
    path = tmp_path / "sub" / "checkpoint"
    for value, whole in enumerate((True, False, True)):
        gloo.run(_replace, str(path), value, whole=whole, world_size=2)
        match, options = "could not be written", {"exception": RuntimeError, "world_size": 2}
        gloo.expect_error_on_all_ranks(_replace, str(path), 9, whole=False, fails=True, match=match, **options)
        assert _names(path.parent) == ["checkpoint"] and _read(path) == value and path.is_file() == whole


def test_files_of_others_stay_and_old_shards_go(gloo: ProcessPool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    gloo.run(_replace, str(path), 1, whole=False, world_size=3)
    assert "__2_0.distcp" in _names(path)
    (path / "tokenizer.json").write_text("mine")
    (path / "hub").mkdir()
    (path / "hub" / "weights.bin").write_text("mine, too")
    gloo.run(_replace, str(path), 2, whole=False, world_size=2)
    assert _names(path) == [*_SHARDS, "hub", "manifest.json", "tokenizer.json"] and _read(path) == 2
    assert (path / "tokenizer.json").read_text() == "mine"
    assert (path / "hub" / "weights.bin").read_text() == "mine, too"
    gloo.expect_error_on_all_ranks(
        _replace, str(path), 3, whole=True, exception=IsADirectoryError, match=r"\(hub, tokenizer.json\)", world_size=2
    )
    assert _names(path) == [*_SHARDS, "hub", "manifest.json", "tokenizer.json"] and _read(path) == 2


def _alone(store: str, action: Callable[[], None], kill_at: int, can_exchange: bool) -> None:
    """Run ``action`` as the only rank, and end like a killed process at the n-th change of the file system."""
    count = 0

    def observe(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        writes = event == "open" and "w" in str(arguments[1])
        exchanges = event == "ctypes.dlsym" and arguments[1] == "renameat2"
        if exchanges and not can_exchange:
            raise OSError("no such function")
        if writes or exchanges or event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove"):
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    sys.addaudithook(observe)
    action()
    os._exit(0)


def is_killed(tmp_path: Path, action: Callable[[], None], kill_at: int, *, can_exchange: bool = True) -> bool:
    """Whether a process of its own came to its ``kill_at``-th change; its libc may lack the exchange of two names."""
    store = tmp_path / f"store{kill_at}"
    # Not os.fork(): a thread of this process may hold a lock, which the child would wait for.
    arguments = (str(store), action, kill_at, can_exchange)
    child = multiprocessing.get_context("forkserver").Process(target=_alone, args=arguments)
    child.start()
    child.join(60)
    if child.exitcode is None:
        child.kill()
    store.unlink(missing_ok=True)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def _put(path: Path, value: int, *, whole: bool) -> None:
    if not whole:
        path.mkdir()
    for file in [path] if whole else [path / name for name in _FEW_FILES]:
        file.write_text(str(value))


def _write_one(path: Path, value: int, *, whole: bool) -> None:
    with replacing(path, whole=whole) as draft:
        _put(draft, value, whole=whole)


def _value(path: Path) -> str:
    """What is in all files of the checkpoint."""
    place = last_written(path)
    (value,) = {file.read_text() for file in ([place] if place.is_file() else [place / name for name in _FEW_FILES])}
    return value


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize(("before", "whole"), [(False, False), (True, True), (False, True), (True, False)])
def test_a_process_killed_anywhere_leaves_all_of_one_checkpoint(
    tmp_path: Path, before: bool, whole: bool, can_exchange: bool
) -> None:
    seen, was_killed = list[str](), True
    while was_killed:
        kill_at = len(seen)
        directory = tmp_path / str(kill_at)
        directory.mkdir()
        path = directory / "last.ckpt"
        _put(path, 1, whole=before)
        has_notes = not before and not whole
        if has_notes:
            (path / "notes.txt").write_text("mine")
        kill = partial(is_killed, tmp_path, can_exchange=can_exchange)
        was_killed = kill(partial(_write_one, path, 2, whole=whole), kill_at)
        seen.append(_value(path))
        # A Trainer looks for the name before any strategy can tell it where to look.
        assert path.exists() or not can_exchange
        assert newest_first(directory) == [path]
        # Another process goes on, and may be killed too.
        for again in (kill_at // 2, 10_000) if kill_at % 3 == 0 or not was_killed else ():
            kill(partial(_write_one, path, 3, whole=whole), again)
            assert _value(path) in ((seen[-1], "3") if again < 10_000 else ("3",))
            if has_notes:
                kept = [*path.glob("notes.txt"), *directory.glob(".*/*/notes.txt")]
                assert [note.read_text() for note in kept] == ["mine"]
            assert again < 10_000 or _names(directory) == ["last.ckpt"]
    assert seen == sorted(seen) and set(seen) == {"1", "2"}


def test_a_checkpoint_is_removed_at_once(tmp_path: Path) -> None:
    """A Trainer resumes from the youngest one, which one is that has lost a file just now."""
    for kill_at in range(20):
        path = tmp_path / "last-v1.ckpt"
        path.mkdir()
        for name in _SHARDS:
            (path / name).write_text("")
        was_killed = is_killed(tmp_path, partial(discard, path), kill_at)
        assert not path.exists() or _names(path) == _SHARDS
        discard(path)
        assert not path.exists()
        if not was_killed:
            return
    raise AssertionError("never ended")


def test_what_killed_processes_have_left_is_removed(gloo: ProcessPool, tmp_path: Path) -> None:
    """Of saves under other names, too, unless they may still be under way."""
    for name, minutes in ((".unfinished-1", 16), (".replaced-1", 16), (".unfinished-2", 14)):
        (tmp_path / name / "checkpoint").mkdir(parents=True)
        for each in (tmp_path / name / "checkpoint", tmp_path / name):
            os.utime(each, times=2 * (time.time() - 60 * minutes,))
    gloo.run(_replace, str(tmp_path / "checkpoint"), 2, whole=True, world_size=2)
    assert _read(tmp_path / "checkpoint") == 2 and _names(tmp_path) == [".unfinished-2", "checkpoint"]
