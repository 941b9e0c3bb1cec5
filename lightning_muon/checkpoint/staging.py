"""Replaces checkpoints atomically: the old one stays until all of the new one is written.

A save writes to ``.unfinished-ID/NAME`` beside its target, which takes the place of the target in one call: a renaming,
or an exchange of the two names where a directory is replaced. Then what was replaced is removed. A process may be
killed at any point. File systems without an exchange (NFS, macOS) need two renamings for a directory; between them the
old checkpoint is in ``.replaced-ID``, where :func:`last_written` finds it, and the next save puts it back.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from lightning_muon.checkpoint.manifest import INDEX, MANIFEST, sync_directory
from lightning_muon.comm.agreement import on_first_rank, together
from lightning_muon.comm.collectives import AxisGroup

# Files that torch.distributed.checkpoint, Fabric and we write into a directory, or did in version 0.1.
_FILES_OF_CHECKPOINTS = ("*.distcp", f"{INDEX}*", "meta.pt", "README-lightning-muon.txt", MANIFEST)
_UNFINISHED, _REPLACED = ".unfinished-", ".replaced-"
# Folders in which nothing has changed for so long are of processes that were killed.
_SECONDS_OF_QUIET = 15 * 60
# Of renameat2(2): paths are relative to the working directory; both must exist and change places.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NOT_POSSIBLE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint; a ``ValueError`` for a URL, which would become a folder of that name. Local."""
    if "://" in str(path):
        raise ValueError(
            f"checkpoints are in folders, not at URLs such as {path}; give a folder of a disk that all nodes see, or "
            "on which the store is mounted, and copy complete ones from it to the store, or back"
        )
    return Path(path)


@contextmanager
def replacing(path: Path, *, whole: bool, everyone: AxisGroup | None = None) -> Generator[Path]:
    """Context that yields a path to write to, which replaces ``path``, the same on all ranks, when all is written.

    With ``whole`` the block writes a file instead of a directory of shards. Files of others in a directory of shards
    are moved to its replacement.

    Collective over all ranks, and the block fails on all of them or on none. A thread gives ``everyone``, all ranks
    with a process group of its own.
    """
    target = _place_of(path)
    own = [_folder(kind, target) for kind in (_UNFINISHED, _REPLACED)]
    draft = own[0] / target.name

    def begin() -> None:
        for folder in (*own, *_abandoned_in(target.parent)):
            _clear(folder)
        draft.parent.mkdir(parents=True)

    def require_written() -> None:
        if not draft.exists():
            raise FileNotFoundError(f"nothing was written to {draft}")

    def commit() -> None:
        _put(draft, target)
        sync_directory(target.parent)
        for folder in own:
            _clear(folder)

    on_first_rank(begin, everyone)
    try:
        together(lambda: _require_replaceable(target, whole=whole), (everyone,))
        yield draft
        on_first_rank(require_written, everyone)
    except BaseException as error:  # Also dcp.CheckpointException, which is no Exception.
        if dist.get_rank() == 0:
            if not draft.parent.exists():
                error.add_note(f"{draft.parent} is gone: do two runs save to one folder? Give each one its own.")
            with suppress(OSError):  # The first error is raised, not one of the cleanup.
                remove(draft.parent)
        raise
    on_first_rank(commit, everyone)


def last_written(path: Path) -> Path:
    """Where to read the last complete save to ``path``, if any; local. Rank 0 should decide for all."""
    target = path.resolve()
    replaced = _folder(_REPLACED, target) / target.name
    return replaced if not _exists(target) and replaced.exists() else path


def names_in(folder: Path) -> list[Path]:
    """The paths in a folder, and those of which :func:`last_written` knows. Local."""
    return [*folder.iterdir(), *(folder / path.name for path in folder.glob(f"{_REPLACED}*/*"))]


def discard(path: Path) -> None:
    """Remove a checkpoint, if there is one; it is moved away as a whole before it is deleted. Local."""
    _clear(_folder(_REPLACED, path))
    folder = _folder(_UNFINISHED, path)
    if path.is_dir() and not path.is_symlink():
        remove(folder)
        folder.mkdir()
        path.rename(folder / path.name)
    else:
        path.unlink(missing_ok=True)
    remove(folder)


def remove(path: Path) -> None:
    """Remove a file, a link or a directory, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _folder(kind: str, target: Path) -> Path:
    # Its name does not contain that of a checkpoint: Lightning takes any entry with `hpc_ckpt_` in it for one.
    return target.parent / (kind + hashlib.sha256(target.name.encode()).hexdigest()[:8])


def _place_of(path: Path) -> Path:
    """The path that a save to ``path`` replaces: a link's target, or the link itself if it points to a neighbour."""
    # Lightning's `save_last="link"` makes such links; they point to another checkpoint, which has to stay.
    place, target = path.parent.resolve() / path.name, path.resolve()
    return place if target.parent == place.parent else target


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _put(draft: Path, target: Path) -> None:
    """Rename ``draft`` to ``target``; what was there is then below ``.unfinished-ID`` or ``.replaced-ID``, or gone."""
    has_directory = any(path.is_dir() and not path.is_symlink() for path in (draft, target))
    if not (has_directory and _exists(target)):
        draft.replace(target)
    elif not _swap(draft, target):
        replaced = _folder(_REPLACED, target)
        replaced.mkdir()
        target.rename(replaced / target.name)
        draft.rename(target)


def _swap(one: Path, other: Path) -> bool:
    """Let two entries of one file system change their places in one call; ``False`` where there is no such call."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # Another libc than glibc 2.28.
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code not in _NOT_POSSIBLE:
        raise OSError(code, os.strerror(code), str(other))
    return False


def _clear(folder: Path) -> None:
    """Remove what a save has left in a folder beside its target; files of others in what was replaced go home."""
    for old in folder.iterdir() if folder.is_dir() else ():
        home = folder.parent / old.name
        if folder.name.startswith(_REPLACED) and not _exists(home):  # Killed between two renamings.
            old.rename(home)
        for item in _of_others(old) if home.is_dir() else ():
            item.rename(home / item.name)
    remove(folder)


def _abandoned_in(parent: Path) -> list[Path]:
    """Drafts, and what was about to be deleted, of processes that were killed."""
    found: list[Path] = []
    for folder in (*parent.glob(f"{_UNFINISHED}*"), *parent.glob(f"{_REPLACED}*")):
        with suppress(OSError):  # Another process removes it.
            last = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
            found += [folder] if time.time() - last > _SECONDS_OF_QUIET else []
    return found


def _require_replaceable(path: Path, *, whole: bool) -> None:
    others = _of_others(path)
    if others and (whole or not (path / INDEX).is_file()):
        names = ", ".join(other.name for other in others[:4])
        raise IsADirectoryError(f"{path} is a directory with other files ({names}); save under another name")


def _of_others(path: Path) -> list[Path]:
    """Files in a directory that do not belong to a checkpoint."""
    if path.is_symlink() or not path.is_dir():
        return []
    return sorted(item for item in path.iterdir() if not any(item.match(own) for own in _FILES_OF_CHECKPOINTS))
