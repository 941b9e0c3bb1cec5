"""Finds the checkpoint to resume from: the newest one whose files are as they were written."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_muon.checkpoint.manifest import CLOCK, MANIFEST, damages, describe
from lightning_muon.checkpoint.staging import last_written, names_in
from lightning_muon.comm.agreement import gather, together
from lightning_muon.compat.torch import CheckpointReader
from lightning_muon.errors import DamagedCheckpointError


def newest_first(*folders: Path, of_runs: bool = True) -> list[Path]:
    """The checkpoints in ``folders``, newest first, damaged ones included.

    Local. These are files and directories with the suffix ``.ckpt``, and other directories with a manifest; with
    ``of_runs`` only those from which a run can be resumed, which have more than weights.
    """
    found: list[tuple[float, Path]] = []
    for path in {path for folder in folders if folder.is_dir() for path in names_in(folder)}:
        place = last_written(path)
        if path.name.startswith(".") or not (path.suffix == ".ckpt" or (place / MANIFEST).is_file()):
            continue
        about = _about(place)
        if not (of_runs and about.get("weights_only")):
            found.append((time_of(path), path))
    return [path for _, path in sorted(found, reverse=True)]


def time_of(path: Path) -> float:
    """Seconds since 1970 at which a checkpoint was saved; local."""
    place = last_written(path)
    try:
        return _about(place).get("time") or place.stat().st_mtime
    except OSError:  # Removed by the program that wrote it.
        return 0.0


def _about(place: Path) -> dict[str, Any]:
    try:
        return describe(place) or {}
    except DamagedCheckpointError:
        return {}


def first_intact(paths: Sequence[Path]) -> Path:
    """Where to read the first of ``paths`` that is not damaged; rank 0 warns of those before it.

    Each rank reads a part of the bytes. What has no hashes must be readable, unless it is the last of them. Rank 0's
    ``paths`` count. Collective over all ranks.

    Raises:
        DamagedCheckpointError: On all ranks, if none is left; it names every bad file.
    """
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    problems: list[str] = []
    places = gather([last_written(path) for path in paths], None)[0]
    for place in places:
        own = together(partial(damages, place, part=rank, num_parts=num_ranks))
        found = gather(own, None)
        bad = list(dict.fromkeys(line for lines in found for line in lines or ()))
        if found[0] is None and place != places[-1]:
            try:
                together(partial(_read_first, place))
            except Exception as problem:
                bad = [f"it has no hashes, and cannot be read: {type(problem).__name__}: {problem}"]
        if not bad:
            if problems:
                _warn("\n".join([*problems, f"Going on from {place}, which is as it was written."]))
            if found[0] is None:
                _warn(
                    f"{place} has no hashes of its files (an earlier version or another program wrote it), so damage "
                    "would not be noticed."
                )
            if place.exists():
                CLOCK.has_seen(describe(place))
            return place
        problems += [f"{place} is damaged:", *(f"  {line}" for line in bad)]
    raise DamagedCheckpointError("\n".join(problems))


def _read_first(path: Path) -> None:
    """Read what every load reads first, the index of shards and the head of a file, without running code; local."""
    if path.is_dir():
        CheckpointReader(path).read_metadata()
    with suppress(pickle.UnpicklingError):  # Objects that need the user's word.
        torch.load(path / "meta.pt" if path.is_dir() else path, mmap=True, map_location="meta", weights_only=True)


def _warn(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(text, stacklevel=3)
