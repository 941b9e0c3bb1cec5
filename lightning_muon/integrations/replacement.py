"""Checkpoints that take the place of others: what was there stays until all of the new one is written."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_muon.comm.agreement import on_first_rank, together

_INDEX = ".metadata"
# What torch.distributed.checkpoint writes into a directory, and what Fabric puts beside it.
_FILES_OF_CHECKPOINTS = ("*.distcp", f"{_INDEX}*", "meta.pt")


@contextmanager
def replacing(*paths: Path, whole: bool) -> Generator[list[Path]]:
    """Give the block paths to write to, beside ``paths``, whose places they take when all is written.

    Collective over all ranks; every rank must call it, and the block fails on all of them or on none. If it fails,
    what was there stays as it was. What others have put into a directory of shards moves into the one that follows.
    A process that is killed between the two renames leaves ``.NAME.old``, which the next call brings back.

    Args:
        paths: The same on all ranks.
        whole: Whether the block writes files, in place of directories of shards.

    Raises:
        IsADirectoryError: If a directory is no checkpoint, or has files of others that a file cannot keep.
    """
    targets = [path.resolve() for path in paths]  # The sibling of a link may be on another disk than its target.
    drafts = [_beside(target, "new") for target in targets]
    together(lambda: [_require_replaceable(target, whole=whole) for target in targets])
    on_first_rank(lambda: [_make_place(target) for target in targets])
    try:
        yield drafts
    except BaseException:  # Also dcp.CheckpointException, which is no Exception.
        if dist.get_rank() == 0:
            with suppress(OSError):  # What failed says more than what could not be cleared away.
                for draft in drafts:
                    remove(draft)
        raise
    on_first_rank(lambda: [_swap(target) for target in targets])


def write_shards(content: Mapping[str, Any], directory: Path) -> None:
    """Write what each rank has. Collective over all ranks; every rank must call it."""
    try:
        dcp.save(dict(content), checkpoint_id=directory)
    except dcp.CheckpointException as problem:  # On all ranks; and no Exception, so that it ends a process.
        raise RuntimeError(f"shards could not be written to {directory}: {problem}") from problem


def remove(path: Path) -> None:
    """Remove a file or a directory, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def _require_replaceable(path: Path, *, whole: bool) -> None:
    others = _of_others(path)
    if others and (whole or not (path / _INDEX).is_file()):
        names = ", ".join(other.name for other in others[:4])
        raise IsADirectoryError(f"{path} is a directory with other files ({names}); save under another name")


def _of_others(path: Path) -> list[Path]:
    """What is in a directory beside a checkpoint."""
    if not path.is_dir():
        return []
    return sorted(item for item in path.iterdir() if not any(item.match(own) for own in _FILES_OF_CHECKPOINTS))


def _make_place(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _settle(path)
    remove(_beside(path, "new"))


def _swap(path: Path) -> None:
    """Put the draft in the place of ``path``."""
    draft = _beside(path, "new")
    if path.is_dir() or (path.exists() and draft.is_dir()):  # No single call replaces those.
        path.rename(_beside(path, "old"))
    try:
        draft.replace(path)
    finally:
        _settle(path)


def _settle(path: Path) -> None:
    """End what a swap has begun: forwards where the draft is in its place, else backwards."""
    old = _beside(path, "old")
    if old.exists() and not path.exists():
        old.rename(path)
    for other in _of_others(old):
        if not (path / other.name).exists():
            other.rename(path / other.name)
    remove(old)
