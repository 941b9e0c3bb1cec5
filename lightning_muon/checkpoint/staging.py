"""Replaces checkpoints atomically: the old one stays until all of the new one is written.

A save writes to ``.unfinished-ID/NAME`` beside its target. From the moment at which that folder is renamed to
``.finished-ID`` the new checkpoint counts instead of the old one, for all targets of the save; then its entries are
moved to the targets. A process may be killed at any point: :func:`last_written` finds the one that counts, and the next
save to the same target finishes the move. The target itself exists throughout, perhaps as an empty directory, because
a Trainer that looks for a checkpoint to resume from looks for its name before it asks a strategy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist

from lightning_muon.checkpoint.manifest import INDEX, MANIFEST, sync_directory
from lightning_muon.comm.agreement import on_first_rank, together
from lightning_muon.comm.groups import AxisGroup

# Files that torch.distributed.checkpoint, Fabric and we write into a directory.
README = "README-lightning-muon.txt"
_FILES_OF_CHECKPOINTS = ("*.distcp", f"{INDEX}*", "meta.pt", README, MANIFEST)
_UNFINISHED, _FINISHED, _REPLACED = ".unfinished-", ".finished-", ".replaced-"
# Folders in which nothing has changed for so long are of processes that were killed.
_SECONDS_OF_QUIET = 15 * 60
# File in a finished folder: names beside it that are removed when its entries are moved.
_OBSOLETE = ".obsolete"


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path of a checkpoint; a ``ValueError`` for a URL, which would become a folder of that name. Local."""
    if "://" in str(path):
        raise ValueError(
            f"checkpoints are in folders, not at URLs such as {path}; give a folder of a disk that all nodes see, or "
            "on which the store is mounted, and copy complete ones from it to the store, or back"
        )
    return Path(path)


@contextmanager
def replacing(
    *paths: Path, whole: bool, obsolete: Sequence[Path] = (), everyone: AxisGroup | None = None
) -> Generator[list[Path]]:
    """Context that yields paths to write to, which replace ``paths`` when all is written.

    ``paths``, the same on all ranks, are replaced together if they are in one directory; ``obsolete`` paths beside the
    first of them are removed at the same moment. With ``whole`` the block writes files instead of directories of
    shards. Files of others in a directory of shards are moved to its replacement.

    Collective over all ranks, and the block fails on all of them or on none. A thread gives ``everyone``, all ranks
    with a process group of its own.
    """
    targets = [_place_of(path) for path in paths]
    drafts = [_folder(_UNFINISHED, target, targets[0]) / target.name for target in targets]
    folders = list(dict.fromkeys(draft.parent for draft in drafts))

    def end_earlier_saves() -> None:
        for target in targets:
            own = _folder(_FINISHED, target, targets[0])
            for folder in {*_finished_with(target), *([own] if own.is_dir() else [])}:
                _move_into_place(folder)

    def make_folders() -> None:
        for folder in [each for parent in {folder.parent for folder in folders} for each in _abandoned_in(parent)]:
            remove(folder)
        for folder in folders:
            remove(folder)
            folder.mkdir(parents=True)

    def require_written() -> None:
        missing = [str(draft) for draft in drafts if not draft.exists()]
        if missing:
            raise FileNotFoundError(f"nothing was written to {', '.join(missing)}")

    def commit() -> None:
        if obsolete:
            (folders[0] / _OBSOLETE).write_text("\n".join(path.name for path in obsolete))
        # From here on the drafts count.
        finished = [folder.rename(_other_kind(folder, _FINISHED)) for folder in folders]
        for parent in {folder.parent for folder in finished}:
            sync_directory(parent)
        for folder in finished:
            _move_into_place(folder)

    on_first_rank(end_earlier_saves, everyone)
    together(lambda: [_require_replaceable(target, whole=whole) for target in targets], (everyone,))
    on_first_rank(make_folders, everyone)
    try:
        yield drafts
        on_first_rank(require_written, everyone)
    except BaseException as error:  # Also dcp.CheckpointException, which is no Exception.
        if dist.get_rank() == 0:
            if gone := [str(folder) for folder in folders if not folder.exists()]:
                error.add_note(f"{gone[0]} is gone: does another run save to the same folder? Give each one its own.")
            with suppress(OSError):  # The first error is raised, not one of the cleanup.
                for folder in folders:
                    remove(folder)
        raise
    on_first_rank(commit, everyone)


def last_written(path: Path) -> Path:
    """Where to read the last complete save to ``path``, if any; local. Rank 0 should decide for all."""
    target = path.resolve()
    return next((folder / target.name for folder in _finished_with(target)), path)


def discard(path: Path) -> None:
    """Remove a checkpoint, if there is one; it is moved away as a whole before it is deleted. Local."""
    if path.is_symlink():
        path.unlink()
        return
    for folder in _finished_with(path.resolve()):
        _move_into_place(folder)
    folder = _folder(_REPLACED, path, path)
    _move_away(path, folder)
    remove(folder)


def remove(path: Path) -> None:
    """Remove a file, a link or a directory, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _folder(kind: str, target: Path, first: Path) -> Path:
    """Folder beside ``target`` for all that is saved together with ``first``."""
    # Its name does not contain that of a checkpoint: Lightning takes any entry with `hpc_ckpt_` in it for one.
    return target.parent / (kind + hashlib.sha256(first.name.encode()).hexdigest()[:8])


def _other_kind(folder: Path, kind: str) -> Path:
    return folder.with_name(kind + folder.name.rpartition("-")[2])


def _place_of(path: Path) -> Path:
    """The path that a save to ``path`` replaces: a link's target, or the link itself if it points to a neighbour."""
    # Lightning's `save_last="link"` makes such links; they point to another checkpoint, which has to stay.
    place, target = path.parent.resolve() / path.name, path.resolve()
    return place if target.parent == place.parent else target


def _finished_with(target: Path) -> list[Path]:
    """Folders of finished saves that replace or remove ``target``."""
    folders = sorted(target.parent.glob(f"{_FINISHED}*"))
    return [folder for folder in folders if (folder / target.name).exists() or target.name in _obsolete_in(folder)]


def _abandoned_in(parent: Path) -> list[Path]:
    """Drafts, and what was about to be deleted, of processes that were killed."""
    found: list[Path] = []
    for folder in (*parent.glob(f"{_UNFINISHED}*"), *parent.glob(f"{_REPLACED}*")):
        with suppress(OSError):  # Another process removes it.
            last = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
            found += [folder] if time.time() - last > _SECONDS_OF_QUIET else []
    return found


def _obsolete_in(folder: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return (folder / _OBSOLETE).read_text().splitlines()
    return []


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


def _move_into_place(folder: Path) -> None:
    """Move finished entries to their targets; also finishes this for a process that was killed."""
    replaced = _other_kind(folder, _REPLACED)
    remove(replaced)  # A killed process may have left a file there in place of a directory.
    for name in _obsolete_in(folder):
        _move_away(folder.parent / name, replaced)
    (folder / _OBSOLETE).unlink(missing_ok=True)
    for draft in sorted(folder.iterdir()):
        target = folder.parent / draft.name
        if target.is_dir() and not target.is_symlink():
            for item in _of_others(target) if draft.is_dir() else ():
                item.rename(draft / item.name)
            # A directory can be replaced by a single call once it is empty. The index of the shards is moved first, so
            # that nobody takes the rest for a checkpoint.
            for item in sorted(target.iterdir()):
                _move_away(item, replaced / target.name)
            if not draft.is_dir():
                target.rmdir()
        elif draft.is_dir():
            _move_away(target, replaced)
        draft.replace(target)
    folder.rmdir()
    remove(replaced)


def _move_away(path: Path, folder: Path) -> None:
    """Move ``path``, if it exists, into ``folder``, which is removed later."""
    if path.exists() or path.is_symlink():
        folder.mkdir(parents=True, exist_ok=True)
        remove(folder / path.name)
        path.rename(folder / path.name)
