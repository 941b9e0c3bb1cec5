"""What a checkpoint says of itself, written last, by which damage is found before anything is loaded or unpickled.

A directory has :data:`MANIFEST` with the size and SHA-256 of each file. A single file has its own in the comment of the
zip archive that ``torch.save`` makes, so that it may be moved and copied alone. Bytes are hashed while they are
written, never by reading them again. Hashes tell damage, and nothing about who has written the bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta

from lightning_muon.errors import DamagedCheckpointError

MANIFEST = "manifest.json"
INDEX = ".metadata"  # The index file of torch.distributed.checkpoint.
_FORMAT = 1
_MARK = b"lightning-muon "  # Before our comment of an archive, which is JSON, unlike that of version 0.1.
_END_OF_ARCHIVE, _SIZE_OF_END, _MOST_OF_COMMENT = b"PK\5\6", 22, 2**16
_LENGTH = 2  # Bytes of a comment's length, before it; hashed as zeros.
_TYPES = {"time": int | float, "save": str, "mesh": dict}
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
    """``torch.save`` to one file that says ``about`` of itself, and its hash; local."""
    with HashedFile(path) as file:
        torch.save(content, cast("IO[bytes]", file))
        comment = _MARK + json.dumps(_sealed({**about, "file": file.entry})).encode()
        file.seek(-_LENGTH, os.SEEK_END)
        file.write(len(comment).to_bytes(_LENGTH, "little") + comment)


def write_manifest(directory: Path, files: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Write the manifest of ``directory``; local, by one rank, when all files are there."""
    manifest = {"format": _FORMAT, **about, "files": dict(sorted(files.items()))}
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(_sealed(manifest), file, indent=1)
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
    """What a checkpoint says of itself, without reading all of it; ``None`` if it says nothing. Local.

    Raises:
        DamagedCheckpointError: It cannot be read, or is not as it was written.
        ValueError: A later version of lightning-muon has written it.
    """
    manifest, index = path / MANIFEST, path / INDEX
    try:
        if not path.is_dir():
            comment = _comment_of(path)
            return _unsealed(path, comment.removeprefix(_MARK)) if comment and b" sha256=" not in comment else None
        if manifest.is_file():
            return _unsealed(manifest, manifest.read_bytes())
        if index.is_file() and MANIFEST.encode() in index.read_bytes():  # See ShardWriter.storage_meta.
            raise DamagedCheckpointError(f"{manifest} is missing")
    except OSError as problem:
        raise DamagedCheckpointError(f"{path} cannot be read: {problem}") from None
    return None


def damages(path: Path, *, part: int = 0, num_parts: int = 1) -> list[str] | None:
    """Find damage, a line for each file; ``[]`` if there is no checkpoint, ``None`` for one without hashes.

    With ``num_parts`` readers each reads about as many bytes; ``part`` is the number of this one. Local.
    """
    if not path.exists() and not path.is_symlink():
        return []
    try:
        about = describe(path)
    except DamagedCheckpointError as problem:
        return [str(problem)]
    if path.is_dir() and path.suffix == ".ckpt" and about is None and not (path / INDEX).is_file():
        return [f"{path} has neither {MANIFEST} nor {INDEX}: it was not written to its end, or they were lost"]
    if about is None:
        return None
    if not path.is_dir():
        found = [_difference(path, about["file"], len(_comment_of(path)), _LENGTH)] if part == 0 else []
    else:
        sizes = {name: entry["size"] for name, entry in about["files"].items()}
        names = sorted(sizes, key=lambda name: (-sizes[name], name))
        found = [_difference(path / name, about["files"][name]) for name in names[part::num_parts]]
    return [line for line in found if line]


def require_one_save(paths: Sequence[Path]) -> None:
    """Raise if the manifests of these show that they were written by different saves; local."""
    saves = {path: about["save"] for path in paths if (about := describe(path)) is not None}
    if len(set(saves.values())) > 1:
        raise DamagedCheckpointError(f"{', '.join(map(str, saves))} were written by different saves")


def _difference(path: Path, entry: Mapping[str, Any], left_out: int = 0, zeros: int = 0) -> str | None:
    """A line on the damage of a file; ``None`` if there is none.

    Its last ``left_out`` bytes were not hashed, and of those before them the last ones as ``zeros``.
    """
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size - left_out
    if size != entry["size"]:
        return f"{path} has {size} bytes, not the {entry['size']} that were written"
    sha256, left = hashlib.sha256(), size - zeros
    try:
        with path.open("rb", buffering=0) as file:
            while left > 0 and (piece := file.read(min(_PIECE, left))):
                sha256.update(piece)
                left -= len(piece)
    except OSError as problem:  # A disk that fails.
        return f"{path} cannot be read: {problem}"
    sha256.update(bytes(zeros))
    return None if sha256.hexdigest() == entry["sha256"] else f"{path} is not as it was written"


def _comment_of(path: Path) -> bytes:
    """The comment of the archive that a single file is; empty for safetensors."""
    if path.suffix == ".safetensors":
        return b""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_OF_COMMENT))
        end = file.read()
    place = end.rfind(_END_OF_ARCHIVE)
    before, comment = end[: place + _SIZE_OF_END], end[place + _SIZE_OF_END :]
    if place < 0 or before[-_LENGTH:] != len(comment).to_bytes(_LENGTH, "little"):
        raise DamagedCheckpointError(f"{path} has no end: it was cut off, or is no archive, as torch.save writes them")
    return comment


def _sealed(about: Mapping[str, Any]) -> dict[str, Any]:
    """The same with a hash of itself."""
    return {**about, "sha256": hashlib.sha256(json.dumps(dict(about), sort_keys=True).encode()).hexdigest()}


def _unsealed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        sealed = json.loads(text)
        about = {key: value for key, value in sealed.items() if key != "sha256"}
        if _sealed(about) != sealed:
            raise ValueError("its hash is another")
        is_later = about.get("format", _FORMAT) > _FORMAT
        if not is_later:
            entries = about["files"].values() if path.name == MANIFEST else [about["file"]]
            typed = [(about[key], kind) for key, kind in _TYPES.items() if key in about]
            typed += [pair for entry in entries for pair in ((entry["size"], int), (entry["sha256"], str))]
            if not all(isinstance(value, kind) for value, kind in typed):
                raise ValueError("a value has another type")
    # Also bytes that are no text, other values than a mapping, and brackets without end.
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as problem:
        raise DamagedCheckpointError(f"{path} is not as it was written: {problem}") from None
    if is_later:
        raise ValueError(
            f"{path} was written by a later version of lightning-muon, in format {about['format']}; this one reads "
            f"formats up to {_FORMAT}: install that version"
        )
    return about
