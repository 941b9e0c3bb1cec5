"""Places of checkpoints: paths, and URLs of any file system that fsspec knows, such as object stores."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

from fsspec.core import url_to_fs
from typing_extensions import override

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:(:|/)")  # A Path keeps one of two slashes.


def place(path: str | Path) -> Path:
    """Make a path; from a URL (``"s3://bucket/run"``), a :class:`UrlPath`. ``file://`` is an ordinary path. Local."""
    if isinstance(path, UrlPath) or not is_url(path):
        return Path(path) if isinstance(path, str) else path
    url = UrlPath(path)
    return Path("/", *url.parts[1:]) if url.parts[0] == "file:" else url


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` begins with the name of a protocol; local."""
    return bool(_URL.match(str(path)))


class UrlPath(PosixPath):
    """A URL that is used as a path; its file system has no atomic rename or replacement, except of one file."""

    @override
    def __str__(self) -> str:
        scheme, *parts = self.parts
        # The part after the two slashes is a bucket, or nothing on a local disk.
        return f"{scheme}//{'/' * (scheme == 'local:')}{'/'.join(parts)}"

    @override
    def __fspath__(self) -> str:
        return str(self)

    @property
    def _place(self) -> tuple[Any, str]:
        """The file system, and the path in it."""
        system, path = url_to_fs(str(self))
        system.invalidate_cache()  # Other ranks write, too.
        return system, path

    @override
    def resolve(self, strict: bool = False) -> UrlPath:
        return self

    @override
    def exists(self, **_: Any) -> bool:
        system, path = self._place
        return system.exists(path)

    @override
    def is_file(self, **_: Any) -> bool:
        system, path = self._place
        return system.isfile(path)

    @override
    def is_dir(self, **_: Any) -> bool:
        system, path = self._place
        return system.isdir(path)

    @override
    def is_symlink(self) -> bool:
        return False

    @override
    def iterdir(self) -> Iterator[UrlPath]:
        system, path = self._place
        for found in system.ls(path, detail=False):
            yield self / str(found).rstrip("/").rpartition("/")[2]

    @override
    def stat(self, **_: Any) -> Any:
        system, path = self._place
        return SimpleNamespace(st_size=system.size(path), st_mtime=0.0)

    @override
    def open(self, mode: str = "r", buffering: int = -1, **options: Any) -> Any:
        system, path = self._place
        return system.open(path, mode, **options)

    @override
    def mkdir(self, *_: Any, **__: Any) -> None:
        system, path = self._place
        system.makedirs(path, exist_ok=True)

    @override
    def rename(self, target: Any) -> Any:
        system, path = self._place
        system.mv(path, target._place[1])
        return target

    @override
    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok or self.exists():
            system, path = self._place
            system.rm(path)

    def remove(self) -> None:
        """Remove a file, or all files below this URL, if there are any."""
        if self.exists():
            system, path = self._place
            system.rm(path, recursive=True)
