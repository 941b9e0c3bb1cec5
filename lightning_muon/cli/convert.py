"""``lightning-muon convert DIR FILE``: a directory of shards becomes one ordinary Lightning checkpoint."""

from __future__ import annotations

import argparse
import os
import pickle
import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from lightning_muon.checkpoint.manifest import damages
from lightning_muon.checkpoint.staging import last_written
from lightning_muon.compat.lightning import metadata_filename
from lightning_muon.compat.torch import load_whole
from lightning_muon.errors import DamagedCheckpointError
from lightning_muon.integrations.registry import TRAINERS, first_installed

_DESCRIPTION = """Turn a checkpoint that ParallelMuonStrategy saved as a directory into one file that
MyModule.load_from_checkpoint and a Trainer with any strategy read: weights, hyper-parameters and everything else but
the states of optimizers. Needs no GPU and no other process, but memory for the weights."""
_TRUST = """unpickle objects of any type in the metadata, for example hyper-parameters of your own classes; that can
run any code. (torch unpickles its own index of the directory in any case.)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("directory", metavar="DIR", type=Path, help="the checkpoint: a directory")
    parser.add_argument("file", metavar="FILE", type=Path, help="where to write the single file")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--trust-pickle", action="store_true", help=_TRUST)


def run(arguments: argparse.Namespace) -> None:
    """Write the file, all at once or not at all."""
    package = TRAINERS[first_installed(TRAINERS, "lightning-muon convert needs Lightning")]
    directory, file = last_written(arguments.directory), arguments.file
    metadata = directory / metadata_filename(package)
    if not metadata.is_file():
        raise FileNotFoundError(f"{directory} is no checkpoint directory: there is no file {metadata.name} in it")
    if file.is_dir():
        raise FileExistsError(f"{file} is a directory; name a file")
    if file.exists() and not arguments.force:
        raise FileExistsError(f"{file} exists; --force overwrites it")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {file.parent} for {file.name}")
    if bad := damages(directory):
        raise DamagedCheckpointError("\n".join([f"{directory} is damaged:", *bad]))
    is_trusted = arguments.trust_pickle
    try:
        content = torch.load(metadata, map_location="cpu", weights_only=not is_trusted)
    except (pickle.UnpicklingError, EOFError, ImportError, AttributeError) as error:
        if is_trusted or not isinstance(error, pickle.UnpicklingError):
            raise ValueError(f"{metadata} cannot be read: {error}") from error
        raise ValueError(
            f"{metadata} has objects that torch.load(weights_only=True) refuses; if you trust whoever wrote it, use "
            f"--trust-pickle ({str(error).strip().splitlines()[0]})"
        ) from error
    content.pop("optimizer_states", None)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            content["state_dict"] = load_whole(directory, "state_dict")
    except (CheckpointException, OSError, EOFError, pickle.UnpicklingError) as problem:
        raise ValueError(
            f"the shards in {directory} cannot be read; the directory must have the files of all ranks, complete "
            f"({type(problem).__name__}: {problem})"
        ) from problem
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        torch.save(content, temporary)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
