"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that no other process can see half written.

    Args:
        path: Its folder is created if missing.
        text: Content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", suffix=".tmp", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def write_folder_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Fill a folder that no other process can see half filled; an existing one is kept.

    Args:
        path: Its parent is created if missing.
        write: Fills the folder that it is given.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, suffix=".tmp"))
    try:
        write(temporary)
        try:
            os.replace(temporary, path)
        except OSError:
            if not path.exists():  # Another process may have been faster.
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
