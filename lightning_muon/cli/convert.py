"""``lightning-muon convert SOURCE TARGET``: a directory of shards, one file and safetensors become each other."""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lightning_muon.checkpoint.manifest import INDEX, damages, write_file
from lightning_muon.checkpoint.saving import describe_save, write_shards
from lightning_muon.checkpoint.staging import last_written, replacing
from lightning_muon.compat.lightning import metadata_filename
from lightning_muon.compat.torch import load_whole
from lightning_muon.errors import DamagedCheckpointError
from lightning_muon.integrations.registry import TRAINERS, first_installed
from lightning_muon.params.layers import clean_name

_DESCRIPTION = """Turn a checkpoint into another format, without the states of optimizers. A directory of shards becomes
one file, which MyModule.load_from_checkpoint and a Trainer with any strategy read; one file becomes a directory of
shards. A TARGET that ends with .safetensors gets the weights alone; a SOURCE that does becomes one file. Needs no GPU
and no other process, but memory for the weights, and twice for safetensors."""
_TRUST = """unpickle objects of any type, for example hyper-parameters of your own classes; that can run any code"""
_SAFETENSORS = ".safetensors"
# What else a Trainer needs, to start from weights alone.
_BEGINNING: dict[str, Any] = {"optimizer_states": [], "lr_schedulers": [], "epoch": 0, "global_step": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the checkpoint")
    parser.add_argument("target", metavar="TARGET", type=Path, help="where to write the other one")
    parser.add_argument("--force", action="store_true", help="overwrite TARGET, if it is a file")
    parser.add_argument("--trust-pickle", action="store_true", help=_TRUST)


def run(arguments: argparse.Namespace) -> None:
    """Write the target, all at once or not at all."""
    package = first_installed(TRAINERS, "lightning-muon convert needs Lightning")
    metadata_name = metadata_filename(TRAINERS[package])
    source, target = last_written(arguments.source), arguments.target
    _check_places(source, target, metadata_name, overwrites=arguments.force)
    if source.suffix != _SAFETENSORS and (bad := damages(source)):
        raise DamagedCheckpointError("\n".join([f"{source} is damaged:", *bad]))
    content = {"pytorch-lightning_version": version(package.partition(".")[0])}
    content |= _read(source, metadata_name, is_trusted=arguments.trust_pickle)
    writes_shards = source.is_file() and _SAFETENSORS not in (source.suffix, target.suffix)
    with _alone(), replacing(target, whole=not writes_shards) as draft:
        about = describe_save(step=content.get("global_step"), weights_only=True)
        if target.suffix == _SAFETENSORS:
            kind = "safetensors"
            _write_safetensors(content, draft)
        elif writes_shards:
            kind, weights = "a directory of shards", _weights(content)
            rest = {key: content[key] for key in content if key not in weights}
            write_shards(weights, draft, about, {metadata_name: rest})
        else:
            kind = "one file"
            write_file(content, draft, about)
    sys.stdout.write(f"wrote {target}, {kind}, without states of optimizers\n")


def _check_places(source: Path, target: Path, metadata_name: str, *, overwrites: bool) -> None:
    if not source.exists():
        raise FileNotFoundError(f"there is no {source}")
    if source.is_dir() and not any((source / name).is_file() for name in (metadata_name, INDEX)):
        raise FileNotFoundError(f"{source} is no checkpoint directory: there is no file {metadata_name} in it")
    if target.is_dir():
        raise FileExistsError(f"{target} is a directory; name a new one, or a file")
    if target.exists() and not overwrites:
        raise FileExistsError(f"{target} exists; --force overwrites it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} for {target.name}")


def _read(source: Path, metadata_name: str, *, is_trusted: bool) -> dict[str, Any]:
    """Whole weights, and everything else but states of optimizers."""
    if source.is_dir():
        rest = source / metadata_name
        # A checkpoint of Accelerate has no such file.
        return (_unpickled(rest, is_trusted=is_trusted) if rest.is_file() else {}) | _read_shards(
            source, is_trusted=is_trusted
        )
    if source.suffix == _SAFETENSORS:
        from safetensors.torch import load_file

        return _BEGINNING | {"state_dict": load_file(source)}
    content = _unpickled(source, is_trusted=is_trusted)
    if all(isinstance(value, Tensor) for value in content.values()):  # The state dict of a module.
        return _BEGINNING | {"state_dict": content}
    kept = {key: value for key, value in content.items() if key != "optimizer_states"}
    return {key: value for key, value in kept.items() if not (isinstance(value, Mapping) and "param_groups" in value)}


def _read_shards(directory: Path, *, is_trusted: bool) -> dict[str, Any]:
    try:
        return load_whole(directory, with_optimizers=False, weights_only=not is_trusted)
    except (CheckpointException, OSError, EOFError, pickle.UnpicklingError) as problem:
        raise ValueError(
            f"the shards in {directory} cannot be read; the directory must have the files of all ranks, complete "
            f"({type(problem).__name__}: {problem})"
        ) from problem


def _unpickled(path: Path, *, is_trusted: bool) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=not is_trusted)
    except (pickle.UnpicklingError, EOFError, ImportError, AttributeError) as error:
        if is_trusted or not isinstance(error, pickle.UnpicklingError):
            raise ValueError(f"{path} cannot be read: {error}") from error
        raise ValueError(
            f"{path} has objects that torch.load(weights_only=True) refuses; if you trust whoever wrote it, use "
            "--trust-pickle"
        ) from error


def _weights(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Key -> whole weights by name; the key is Lightning's, or those that a program has chosen."""
    own = [key for key, value in content.items() if isinstance(value, Mapping) and Tensor in map(type, value.values())]
    keys = ["state_dict"] if "state_dict" in content else own
    return {key: {clean_name(name): value for name, value in content[key].items()} for key in keys}


def _write_safetensors(content: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    models = _weights(content)
    if len(models) != 1:
        raise ValueError(f"safetensors have the weights of one model, and there are {list(models)}; write one file")
    (weights,) = models.values()
    # Copies, because the format knows no tied weights, which share their memory.
    tensors = {name: value.clone() for name, value in weights.items() if isinstance(value, Tensor)}
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, {"format": "pt"})


@contextmanager
def _alone() -> Generator[None]:
    """Context with a process group of this process only, because the functions that write checkpoints need one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
