"""``lightning-muon convert SOURCE TARGET``: shards, one ordinary file and safetensors become each other.

A folder for ``from_pretrained`` of transformers, with config, tokenizer and model card, is made in ``convert_hf.py``.
"""

from __future__ import annotations

import argparse
import importlib
import pickle
import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_muon.checkpoint.manifest import INDEX, HashedFile, damages, describe, write_file, write_manifest
from lightning_muon.checkpoint.saving import NAMES, describe_save, numbered_optimizer_state, write_shards
from lightning_muon.checkpoint.staging import last_written, replacing
from lightning_muon.checkpoint.urls import UrlPath, place
from lightning_muon.cli import convert_hf
from lightning_muon.cli.convert_hf import Source, find_run
from lightning_muon.compat.lightning import metadata_filename
from lightning_muon.compat.torch import load_whole
from lightning_muon.errors import DamagedCheckpointError
from lightning_muon.integrations.registry import TRAINERS, first_installed
from lightning_muon.params.uses import clean_name

_DESCRIPTION = """Turn a checkpoint into another format. SOURCE is a directory of shards, one file of Lightning, or a
file or folder of safetensors. By default TARGET is one file, which MyModule.load_from_checkpoint and a Trainer with any
strategy read: weights, hyper-parameters and everything else but the states of optimizers. Needs no GPU and no other
process, but memory for the weights, and twice for safetensors. TARGET gets hashes for lightning-muon verify."""
_TRUST = """unpickle objects of any type in the metadata, for example hyper-parameters of your own classes; that can
run any code. (torch unpickles its own index of the directory in any case.)"""
_TO = """what TARGET becomes: one file, a directory of shards, the weights alone as safetensors, or (hf) a whole folder
for from_pretrained of transformers, with config, tokenizer and model card. Default: file, or shards if SOURCE is a
file"""
_KEY = "key of the weights in SOURCE: the name in fabric.save (default: %(default)s)"
_PREFIX = """what names begin with in a LightningModule, such as "model."; safetensors are without it. Default: the
attribute that all names begin with, if there is one, and nothing for SOURCE in safetensors. With hf: what the names of
the model are found behind"""
_CONFIG = "config.json of the model, or the folder that has it, to be copied to safetensors"
_SAFETENSORS = ".safetensors"
# What TARGET is, by --to.
_WRITTEN = {
    "file": "one file, {states}",
    "shards": "a directory of shards, {states}",
    "safetensors": "a folder of safetensors",
    "hf": "a folder for from_pretrained of transformers",
}
# Other entries of a checkpoint with weights only, so that a Trainer can start from it.
_NOTHING_ELSE = {"optimizer_states": [], "lr_schedulers": [], "epoch": 0, "global_step": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = _DESCRIPTION
    parser.add_argument("source", metavar="SOURCE", type=place, help="the checkpoint, or its URL")
    parser.add_argument("target", metavar="TARGET", type=place, help="where to write the other one")
    parser.add_argument("--to", choices=("file", "shards", "safetensors", "hf"), help=_TO)
    parser.add_argument("--optimizers", action="store_true", help="keep the states of optimizers: a run can go on")
    parser.add_argument("--key", default="state_dict", help=_KEY)
    parser.add_argument("--prefix", help=_PREFIX)
    parser.add_argument("--config", type=Path, help=_CONFIG)
    parser.add_argument("--force", action="store_true", help="overwrite TARGET, if it is a file")
    parser.add_argument("--trust-pickle", action="store_true", help=_TRUST)
    convert_hf.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Write the target, all at once or not at all."""
    package = first_installed(TRAINERS, "lightning-muon convert needs Lightning")
    metadata_name = metadata_filename(TRAINERS[package])
    source, target = last_written(arguments.source), arguments.target
    if not source.exists():
        raise FileNotFoundError(f"there is no {source}")
    files = [source] if not source.is_dir() else sorted(source.iterdir())
    tensors = [path for path in files if path.suffix == _SAFETENSORS]
    kind = "safetensors" if tensors else "shards" if source.is_dir() else "file"
    to = arguments.to or ("shards" if kind == "file" else "file")
    if kind == to:
        raise ValueError(f"{source} is {to} already; say with --to what it becomes")
    if not source.is_file() and not tensors and not any((source / name).is_file() for name in (metadata_name, INDEX)):
        raise FileNotFoundError(f"{source} is no checkpoint directory: there is no file {metadata_name} in it")
    config = _require_target(target, arguments, to)
    if to == "hf":
        importlib.import_module("transformers")  # If it is missing, say so before gigabytes are read.
    if bad := damages(source):
        raise DamagedCheckpointError("\n".join([f"{source} is damaged:", *bad]))
    read: dict[str, Callable[[], dict[str, Any]]] = {
        "safetensors": lambda: _read_safetensors(tensors, arguments),
        "shards": lambda: _read_shards(source, source / metadata_name, arguments),
        "file": lambda: _read_file(source, arguments),
    }
    content: dict[str, Any] = {"pytorch-lightning_version": version(package.partition(".")[0])}
    content |= read[kind]()
    states = content.pop("optimizer_states")
    is_run = arguments.optimizers and bool(states)
    if to in ("file", "shards") and not is_run and "loops" not in content:
        content["optimizer_states"] = []  # With "loops", Lightning itself reports that states are missing.
    with _alone(), replacing(target, whole=to == "file") as (draft,):
        about = describe_save(step=content.get("global_step"), weights_only=not is_run)
        if to == "hf":
            convert_hf.write_hf(draft, content, _source(source, states, arguments), arguments, about)
        elif to == "safetensors":
            _write_safetensors(draft, content["state_dict"], config, arguments.prefix, about)
        elif to == "file":
            write_file(content | ({"optimizer_states": states} if is_run else {}), draft, about)
        else:
            shards = {f"optimizer_{number}": _named(state) for number, state in enumerate(states) if is_run}
            shards["state_dict"] = content.pop("state_dict")
            write_rest: Any = partial(torch.save, content)
            write_shards(shards, draft, about, {metadata_name: write_rest})
    with_states = "with the states of optimizers" if is_run else "without states of optimizers"
    if arguments.optimizers and not is_run:
        with_states += f", of which {source} has none"
    sys.stdout.write(f"wrote {target}, {_WRITTEN[to].format(states=with_states)}\n")


def _source(source: Path, states: Sequence[Any], arguments: argparse.Namespace) -> Source:
    groups = [group for state in states for group in state["param_groups"]]
    if not groups and source.is_dir() and (source / INDEX).is_file():  # Settings, without the states.
        groups = load_whole(source, "optimizer_0.param_groups")
    run, about = find_run(source, arguments.run_dir), describe(source) or {}
    return Source(path=source, name=arguments.target.name, about=about, param_groups=groups, run=run)


def _require_target(target: Path, arguments: argparse.Namespace, to: str) -> Path | None:
    """The config.json to copy, if any; raises if ``target`` cannot be written."""
    if target.is_dir():
        raise FileExistsError(f"{target} is a directory; name a {'file' if to == 'file' else 'new one'}")
    if target.exists() and not arguments.force:
        raise FileExistsError(f"{target} exists; --force overwrites it")
    if isinstance(target, UrlPath) and to in ("safetensors", "hf"):
        raise ValueError(f"from_pretrained reads no folder at a URL such as {target}; name a folder on a disk")
    if not isinstance(target, UrlPath) and not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} for {target.name}")
    if arguments.config is None:
        return None
    if to != "safetensors":
        raise ValueError("--config belongs to --to safetensors; with --to hf it is --config-from")
    config = arguments.config / "config.json" if arguments.config.is_dir() else arguments.config
    if not config.is_file():
        raise FileNotFoundError(f"there is no {config}")
    return config


def _unpickled(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    is_trusted = arguments.trust_pickle
    try:
        with path.open("rb") as file:
            return torch.load(file, map_location="cpu", weights_only=not is_trusted)
    except (pickle.UnpicklingError, EOFError, ImportError, AttributeError) as error:
        if is_trusted or not isinstance(error, pickle.UnpicklingError):
            raise ValueError(f"{path} cannot be read: {error}") from error
        raise ValueError(
            f"{path} has objects that torch.load(weights_only=True) refuses; if you trust whoever wrote it, use "
            f"--trust-pickle ({str(error).strip().splitlines()[0]})"
        ) from error


def _read_shards(directory: Path, metadata: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    # A checkpoint of Accelerate without this file has weights only.
    content = _unpickled(metadata, arguments) if metadata.is_file() else dict(_NOTHING_ELSE)
    try:
        entries = FileSystemReader(directory).read_metadata().state_dict_metadata
        keys = sorted({name.partition(".")[0] for name in entries})
        _require_key(arguments.key, keys, directory)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            content["state_dict"] = load_whole(directory, arguments.key)
            optimizers = [key for key in keys if arguments.optimizers and key.startswith("optimizer_")]
            # By number: optimizer_2 comes before optimizer_10.
            states = [load_whole(directory, key) for key in sorted(optimizers, key=lambda key: (len(key), key))]
    except (CheckpointException, OSError, EOFError, pickle.UnpicklingError) as problem:
        raise ValueError(
            f"the shards in {directory} cannot be read; the directory must have the files of all ranks, complete "
            f"({type(problem).__name__}: {problem})"
        ) from problem
    content["optimizer_states"] = [_numbered(state) for state in states]
    return content


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    groups = state["param_groups"]
    if len(groups) == 1:  # A pipeline has saved the names of one stage.
        groups[0]["params"] = list(dict.fromkeys([*groups[0]["params"], *state["state"]]))
    names = list(chain.from_iterable(group["params"] for group in groups))
    if not state["state"].keys() <= set(names):
        raise ValueError("--optimizers: several param groups of a pipeline; only a Trainer reads their states")
    return numbered_optimizer_state(state, names)


def _read_file(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    content = _unpickled(path, arguments)
    if arguments.key not in content and all(isinstance(value, Tensor) for value in content.values()):
        content = {arguments.key: content}  # The state dict of a module.
    _require_key(arguments.key, sorted(map(str, content)), path)
    weights = content.pop(arguments.key)
    return _NOTHING_ELSE | content | {"state_dict": {clean_name(name): value for name, value in weights.items()}}


def _read_safetensors(paths: list[Path], arguments: argparse.Namespace) -> dict[str, Any]:
    from safetensors.torch import load, load_file

    prefix = arguments.prefix or ""
    read = [load(path.read_bytes()) if isinstance(path, UrlPath) else load_file(path) for path in paths]
    weights = {f"{prefix}{name}": value for tensors in read for name, value in tensors.items()}
    return _NOTHING_ELSE | {"state_dict": weights}


def _require_key(key: str, keys: list[str], source: Path) -> None:
    if key not in keys:
        raise ValueError(f"{source} has no {key!r}; name the weights with --key, it has {keys}")


def _named(state: Mapping[str, Any]) -> dict[str, Any]:
    groups = state["param_groups"]
    if not all(NAMES in group for group in groups):
        raise ValueError(
            "--optimizers: the file has no names of the parameters of its optimizers (another program or an earlier "
            "version wrote it); a Trainer reads it on any number of ranks, and saves shards"
        )
    names = {n: name for group in groups for n, name in zip(group["params"], group[NAMES], strict=True)}
    named = [{key: value for key, value in group.items() if key != NAMES} for group in groups]
    for group in named:
        group["params"] = [names[number] for number in group["params"]]
    return {"state": {names[number]: value for number, value in state["state"].items()}, "param_groups": named}


def _write_safetensors(
    folder: Path, weights: Mapping[str, Any], config: Path | None, prefix: str | None, about: Mapping[str, Any]
) -> None:
    from safetensors.torch import save

    names = {clean_name(name): name for name, value in weights.items() if isinstance(value, Tensor)}
    if prefix is None:
        first = {name.partition(".")[0] for name in names if "." in name} | {"" for name in names if "." not in name}
        prefix = f"{first.pop()}." if len(first) == 1 and first != {""} else ""
    tensors, storages = dict[str, Tensor](), set[int]()
    for clean, name in names.items():
        value = weights[name].detach().contiguous()
        storage = value.untyped_storage().data_ptr()
        tensors[clean.removeprefix(prefix)] = value.clone() if storage in storages else value  # Tied, or parts of one.
        storages.add(storage)
    folder.mkdir()
    contents = {f"model{_SAFETENSORS}": save(tensors, {"format": "pt"})}
    if config is None:
        print(  # noqa: T201
            "from_pretrained needs the config.json of the model beside the weights: name it with --config, or call "
            "model.config.save_pretrained(TARGET)"
        )
    else:
        contents["config.json"] = config.read_bytes()
    entries = dict[str, Any]()
    for name, data in contents.items():
        with HashedFile(folder / name) as file:
            file.write(data)
        entries[name] = file.entry
    write_manifest(folder, entries, about)


@contextmanager
def _alone() -> Generator[None]:
    """Context with a process group of this process only, because the functions that write checkpoints need one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
