"""``lightning-muon verify PATH``: check that the files of checkpoints are as they were written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_muon.checkpoint.loading import newest_first
from lightning_muon.checkpoint.manifest import INDEX, MANIFEST, damages, describe
from lightning_muon.checkpoint.staging import last_written

_DESCRIPTION = """Read every byte of checkpoints, and compare it with the hashes that were written with them. PATH is a
checkpoint (a directory or a file), or a folder of checkpoints. Exits with 0 if all of them are as they were written;
otherwise with 1, and each bad file is named. Needs neither a GPU nor the program that wrote them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="+", help="a checkpoint, or a folder of them")


def run(arguments: argparse.Namespace) -> None:
    """Print a line for each checkpoint, and each bad file below its own."""
    is_good = True
    for path in arguments.paths:
        for checkpoint in _checkpoints(path):
            bad = damages(checkpoint)
            if bad:
                print("\n".join([f"{checkpoint}: damaged", *(f"  {line}" for line in bad)]))  # noqa: T201
            elif bad is None:
                print(f"{checkpoint}: not verified, it has no hashes (another program or an earlier version wrote it)")  # noqa: T201
            else:
                about = describe(checkpoint) or {}
                print(f"{checkpoint}: as it was written{_described(about)}")  # noqa: T201
            is_good = is_good and bad == []
    if not is_good:
        sys.exit(1)


def _described(about: Mapping[str, Any]) -> str:
    """Facts on the run from the manifest, as text."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in about.get("mesh", {}).items())
    facts = {"step": about.get("step"), "mesh": mesh}
    return "".join(f", {name} {fact}" for name, fact in facts.items() if fact not in (None, ""))


def _checkpoints(path: Path) -> list[Path]:
    last = last_written(path)
    if not last.exists():
        raise FileNotFoundError(f"there is no {path}")
    if not last.is_dir() or (last / MANIFEST).is_file() or (last / INDEX).is_file():
        return [last]
    found = [last_written(each) for each in newest_first(path, of_runs=False)]
    if not found:
        raise FileNotFoundError(f"{path} is no checkpoint with hashes, and there is none in it")
    return found
