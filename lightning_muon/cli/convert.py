"""``lightning-muon convert DIR FILE``: a directory of shards becomes one ordinary Lightning checkpoint."""

from __future__ import annotations

import argparse
import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_muon.checkpoint.staging import last_written

_DESCRIPTION = """Turn a checkpoint that ParallelMuonStrategy saved as a directory into one file that
MyModule.load_from_checkpoint and a Trainer with any strategy read: weights, hyper-parameters and everything else but
the states of optimizers. Needs no GPU and no other process, but memory for the weights."""
_TRUST = """unpickle objects of any type in the metadata, for example hyper-parameters of your own classes; that can
run any code. (torch unpickles its own index of the directory in any case.)"""


def convert_command(args: Sequence[str], *, metadata_name: str) -> None:
    """Run ``lightning-muon convert``; a failure ends the process with a message.

    Args:
        args: What follows ``convert`` on the command line.
        metadata_name: See :func:`convert`.
    """
    parser = argparse.ArgumentParser(prog="lightning-muon convert", description=_DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", type=Path, help="the checkpoint: a directory")
    parser.add_argument("file", metavar="FILE", type=Path, help="where to write the single file")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--trust-pickle", action="store_true", help=_TRUST)
    options = parser.parse_args(args)
    try:
        convert(**vars(options), metadata_name=metadata_name)
    except (OSError, ValueError, RuntimeError) as error:
        raise SystemExit(f"lightning-muon convert: {error}") from error


def convert(
    directory: Path, file: Path, *, metadata_name: str, force: bool = False, trust_pickle: bool = False
) -> None:
    """Write the checkpoint in ``directory`` to a single file, without optimizer states; all at once or not at all.

    The names of weights are those in the directory, without what ``torch.compile`` adds.

    Args:
        directory: Shards and metadata, as ``ParallelMuonStrategy`` saves them.
        file: The result, in a folder that exists.
        metadata_name: File in ``directory`` that holds all but tensors.
        force: Overwrite ``file``.
        trust_pickle: Unpickle objects of any type in the metadata.

    Raises:
        FileNotFoundError: If ``directory`` is no such checkpoint, or the folder of ``file`` does not exist.
        FileExistsError: If ``file`` exists and ``force`` is off, or is a directory.
        ValueError: If the metadata has objects of other types than ``torch.load(weights_only=True)`` reads.
        RuntimeError: If shards are missing or damaged.
    """
    directory = last_written(directory)
    if not (directory / metadata_name).is_file():
        raise FileNotFoundError(f"{directory} is no checkpoint directory: there is no file {metadata_name} in it")
    if file.is_dir():
        raise FileExistsError(f"{file} is a directory; name a file")
    if file.exists() and not force:
        raise FileExistsError(f"{file} exists; --force overwrites it")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent} for {file.name}")
    content = _load_metadata(directory / metadata_name, trust_pickle=trust_pickle)
    content.pop("optimizer_states", None)
    content["state_dict"] = _load_weights(directory)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        torch.save(content, temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _load_metadata(path: Path, *, trust_pickle: bool) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=not trust_pickle)
    except (pickle.UnpicklingError, EOFError, ImportError, AttributeError) as error:
        if trust_pickle or not isinstance(error, pickle.UnpicklingError):
            raise ValueError(f"{path} cannot be read: {error}") from error
        raise ValueError(
            f"{path} has objects that torch.load(weights_only=True) refuses; if you trust whoever wrote it, use "
            f"--trust-pickle ({str(error).strip().splitlines()[0]})"
        ) from error


def _load_weights(directory: Path) -> dict[str, Any]:
    reader = FileSystemReader(directory)
    try:
        index = reader.read_metadata()
        # Key in the directory -> path in the nested dict that was saved: ("state_dict", name of the weight, ...).
        paths = {key: path for key, path in index.planner_data.items() if path[0] == "state_dict"}
        flat: dict[str, Any] = {}
        for key in paths:
            entry = index.state_dict_metadata[key]
            is_tensor = isinstance(entry, TensorStorageMetadata)
            flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") if is_tensor else None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(flat, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, EOFError, pickle.UnpicklingError) as problem:
        raise RuntimeError(
            f"the shards in {directory} cannot be read; the directory must have the files of all ranks, complete "
            f"({type(problem).__name__}: {problem})"
        ) from problem
    return _nest({path: flat[key] for key, path in paths.items()}).get("state_dict", {})


def _nest(flat: Mapping[tuple[str | int, ...], Any]) -> dict[Any, Any]:
    """Rebuild nested dicts and lists from paths; ``_extra_state`` of a module may be such a thing."""
    root: dict[Any, Any] = {}
    lists: list[tuple[dict[Any, Any], str | int]] = []
    for path, value in flat.items():
        place = root
        for part, following in pairwise(path):
            if part not in place and isinstance(following, int):
                lists.append((place, part))
            place = place.setdefault(part, {})
        place[path[-1]] = value
    for place, part in reversed(lists):  # Inner lists first.
        place[part] = [value for _, value in sorted(place[part].items())]
    return root
