"""Manifests of checkpoints, written last, by which a damaged file is found before anything is loaded.

A directory has :data:`MANIFEST` with the size and SHA-256 of each file. A single file ends with its own, in the comment
of the zip archive that ``torch.save`` makes, so that it may be moved and copied alone. Bytes are hashed while they are
written, never by reading them again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import zipfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta

from lightning_muon.errors import DamagedCheckpointError

MANIFEST = "manifest.json"
INDEX = ".metadata"  # The index file of torch.distributed.checkpoint.
_FORMAT = 1
# A zip archive without comment ends with the length of the comment, two bytes of zero.
_LENGTH, _ARCHIVE, _PICKLE = 2, b"PK\3\4", b"\x80"
_MARK, _HASH_MARK, _HASH_DIGITS = b"lightning-muon ", b" sha256=", 64
_MOST_OF_COMMENT = 2**16
_END_OF_ARCHIVE, _SIZE_OF_END = b"PK\5\6", 22  # Of a zip archive, before its comment.
_ENDS_WITH_HASH = re.compile(rb"[0-9a-f]{30}.?[0-9a-f]{30}.{0,3}\Z", re.DOTALL)
_PIECE = 2**22  # Bytes read at a time.


class SaveClock:
    """Seconds since 1970, always later than those of the checkpoints that this process has read or written.

    They decide which checkpoint is newest. If a clock was ahead and is corrected, what a run saves afterwards would
    else be older than what it began with.
    """

    def __init__(self) -> None:
        self._last = 0.0

    def now(self) -> float:
        """The time for a save that begins."""
        self._last = max(time.time(), self._last + 0.001)
        return self._last

    def has_seen(self, about: Mapping[str, Any] | None) -> None:
        """Note the time in a manifest, so that later saves are later."""
        self._last = max(self._last, (about or {}).get("time", 0.0))


CLOCK = SaveClock()


class HashedFile:
    """A file that is being written, with hash and size of its bytes so far; other attributes are those of ``open``."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("wb")
        self._sha256, self.size = hashlib.sha256(), 0
        self.error: OSError | None = None  # The first one, instead of which torch.save raises another error.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self.error is not None:
            with suppress(OSError):
                self._file.close()
            raise self.error from None
        self.close()

    def write(self, data: Any) -> int:
        """Write and hash."""
        self._sha256.update(data)
        self.size += len(data)
        with self._naming_errors():
            return self._file.write(data)

    def close(self) -> None:
        """Wait until the bytes are on the disk."""
        if not self._file.closed:
            with self._naming_errors(), self._file:
                _sync(self._file)

    @property
    def entry(self) -> dict[str, Any]:
        """The manifest's entry for the file."""
        return {"size": self.size, "sha256": self._sha256.hexdigest()}

    @contextmanager
    def _naming_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)  # As in errors of `open`.
            self.error = self.error or error
            raise


class _Archive(HashedFile):
    """The zip archive of a ``torch.save``, to which a comment with its hash is added at the end."""

    _held = b""

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        if len(data) < _LENGTH:
            data = memoryview(self._held + bytes(data))
        elif self._held:
            super().write(self._held)
        super().write(data[:-_LENGTH])
        self._held = bytes(data[-_LENGTH:])
        return len(data)

    def finish(self, about: Mapping[str, Any]) -> None:
        start = _MARK + json.dumps(dict(about)).encode() + _HASH_MARK
        super().write((len(start) + _HASH_DIGITS).to_bytes(_LENGTH, "little") + start)
        self._file.write(self._sha256.hexdigest().encode())


class ShardWriter(FileSystemWriter):
    """Writer of ``torch.distributed.checkpoint`` that knows the hash of each file that this rank has written."""

    def __init__(self, directory: Path) -> None:
        # Tensors are on the host, so that no CUDA stream is needed; HashedFile waits for the disk.
        super().__init__(directory, per_thread_copy_ahead=0, sync_files=False)
        self.fs: _HashingFileSystem = _HashingFileSystem()

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """Name of each file -> its entry in the manifest."""
        return {name: file.entry for name, file in self.fs.files.items()}

    @property
    def error(self) -> OSError | None:
        """The error by which this rank could not write, which ``torch.save`` replaces by its own."""
        return next((file.error for file in self.fs.files.values() if file.error), None)

    def storage_meta(self) -> StorageMeta:
        """Metadata for torch's index, which notes that there is a manifest, so that its loss is noticed."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id, modules=[MANIFEST])


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.files: dict[str, HashedFile] = {}

    def create_stream(self, path: Any, mode: str) -> Any:
        if mode != "wb":
            return super().create_stream(path, mode)
        file = self.files[path.name] = HashedFile(path)
        return file

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


def write_file(content: Any, path: Path, about: Mapping[str, Any]) -> None:
    """``torch.save`` to one file that ends with ``about`` and its hash; local."""
    with _Archive(path) as file:
        torch.save(content, cast("IO[bytes]", file))
        file.finish(about)


def write_manifest(directory: Path, files: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Write the manifest of ``directory``; local, by one rank, when all files are there."""
    manifest = {"format": _FORMAT, **about, "files": dict(sorted(files.items()))}
    manifest["sha256"] = _hash_of(manifest)
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        _sync(file)
    sync_directory(directory)


def _sync(file: IO[Any]) -> None:
    """Wait until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Wait until the names in ``directory`` are on the disk; local."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def describe(path: Path) -> dict[str, Any] | None:
    """Read the manifest of a checkpoint, but not all of the checkpoint; ``None`` without a manifest.

    Raises:
        DamagedCheckpointError: The manifest is damaged, or cannot be read.
    """
    try:
        if path.is_dir():
            return _manifest_of(path)
        comment = _comment_of(path)
    except OSError as problem:
        raise DamagedCheckpointError(f"{path} cannot be read: {problem}") from None
    return None if comment is None else _parsed(path, comment[len(_MARK) : -_HASH_DIGITS - len(_HASH_MARK)])


def _manifest_of(directory: Path) -> dict[str, Any] | None:
    path = directory / MANIFEST
    if not path.is_file():
        if _has_lost_manifest(directory):
            raise DamagedCheckpointError(f"{path} is missing")
        return None
    manifest = _parsed(path, path.read_bytes())
    if manifest.pop("sha256", None) != _hash_of(manifest):
        raise DamagedCheckpointError(f"{path} is not as it was written")
    return manifest


def damages(path: Path, *, part: int = 0, num_parts: int = 1) -> list[str] | None:
    """Find damage of a checkpoint, a line for each file; ``[]`` if there is no checkpoint, ``None`` without a manifest.

    With ``num_parts`` readers each reads about as many bytes; ``part`` is the number of this one. Local.
    """
    if not path.exists() and not path.is_symlink():
        return []
    try:
        about = describe(path)
    except DamagedCheckpointError as problem:
        return [str(problem)]
    if about is None:
        has_index = not path.is_dir() or (path / INDEX).is_file()
        if not has_index and path.suffix == ".ckpt":
            return [f"{path} has neither {MANIFEST} nor {INDEX}: it was not written to its end, or they were lost"]
        return None
    if not path.is_dir():
        return _damages_of_file(path) if part == 0 else []
    sizes = {name: entry["size"] for name, entry in about["files"].items()}
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    found = [_difference(path / name, about["files"][name]) for name in names[part::num_parts]]
    return [line for line in found if line]


def _has_lost_manifest(directory: Path) -> bool:
    if not (directory / INDEX).is_file():
        return False
    try:
        about = FileSystemReader(directory).read_metadata().storage_meta
    except Exception as problem:  # Unpickling damaged bytes may raise anything.
        raise DamagedCheckpointError(f"{directory / INDEX} cannot be read: {type(problem).__name__}") from None
    return about is not None and MANIFEST in about.modules


def require_one_save(paths: Sequence[Path]) -> None:
    """Raise if the manifests of these show that they were written by different saves; local."""
    saves = {path: about["save"] for path in paths if (about := describe(path)) is not None}
    if len(set(saves.values())) > 1:
        raise DamagedCheckpointError(f"{', '.join(map(str, saves))} were written by different saves")


def _difference(path: Path, entry: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != entry["size"]:
        return f"{path} has {size} bytes, not the {entry['size']} that were written"
    return _unlike(path, size, entry["sha256"])


def _damages_of_file(path: Path) -> list[str]:
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(size - _HASH_DIGITS)
        written = file.read()
    line = _unlike(path, size - _HASH_DIGITS, written.decode(errors="replace"))
    return [line] if line else []


def _unlike(path: Path, size: int, sha256: str) -> str | None:
    """A line on the damage if the first ``size`` bytes do not have this hash; else ``None``."""
    try:
        return None if _hash_of_file(path, size) == sha256 else f"{path} is not as it was written"
    except OSError as problem:  # A disk that fails.
        return f"{path} cannot be read: {problem}"


def _comment_of(path: Path) -> bytes | None:
    """Our comment at the end of an archive, also if a byte of it is wrong; ``None`` if there is none."""
    with path.open("rb") as file:
        start = file.read(len(_ARCHIVE))
        is_archive = start == _ARCHIVE
        is_whole = zipfile.is_zipfile(file)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MOST_OF_COMMENT))
        end = file.read()
    place = end.rfind(_END_OF_ARCHIVE)
    if size == 0 or (is_archive and place < 0 and not is_whole):
        raise DamagedCheckpointError(f"{path} has no end: it was cut off")
    if not is_archive and place < 0:
        if start.startswith(_PICKLE):
            return None  # Files of torch before version 1.6.
        raise DamagedCheckpointError(f"{path} is no file that torch.save writes")
    start = end.rfind(_MARK) if _MARK in end else place + _SIZE_OF_END
    comment = end[start:]
    if _MARK in comment or _HASH_MARK in comment or _ENDS_WITH_HASH.search(comment):
        return comment
    return None


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        found = dict(json.loads(text))
    except (ValueError, TypeError) as problem:  # Also bytes that are no text, and other values than a mapping.
        raise DamagedCheckpointError(f"{path} is not as it was written: {problem}") from None
    if found.get("format", _FORMAT) > _FORMAT:
        raise ValueError(
            f"{path} was written by a later version of lightning-muon, in format {found['format']}; this one reads "
            f"formats up to {_FORMAT}: install that version"
        )
    return found


def _hash_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(manifest), sort_keys=True).encode()).hexdigest()


def _hash_of_file(path: Path, size: int) -> str:
    """SHA-256 of the first ``size`` bytes."""
    sha256 = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while size > 0 and (piece := file.read(min(_PIECE, size))):
            sha256.update(piece)
            size -= len(piece)
    return sha256.hexdigest()
