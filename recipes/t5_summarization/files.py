"""Files that appear whole or not at all, and what belongs to the model of a run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Write a text file, and its folder, that no other process can see half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", suffix=".tmp", delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def write_folder_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a folder that no other process can see half filled; an existing one is kept."""
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


def save_with_run(trainer: Any, processor: Any, name: str) -> None:
    """Save what has ``save_pretrained``, such as a tokenizer, in a folder of the run's logs; rank 0 writes."""
    if trainer.is_global_zero and (folder := getattr(trainer.logger, "log_dir", None)):
        processor.save_pretrained(Path(folder, name))
