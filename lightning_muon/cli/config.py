"""``lightning-muon config``: a config file of accelerate with our options in it, for ``lightning-muon launch``."""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import torch
import yaml  # Comes with accelerate.

from lightning_muon.cli.table import count
from lightning_muon.config import MuonConfig, option_docs
from lightning_muon.engine.options import SECTION, Options
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.sharding.modes import Sharding

_DESCRIPTION = """Write a config file of accelerate with a section lightning_muon, in which every option is a comment
with its default. Start a program with it, as it is: lightning-muon launch --config_file FILE program.py"""
_WIDTH = 110
_NUM_PROCESSES = (
    "on all machines (default: replicas x shards x stages if both are given, else a device of this one each)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description, add = _DESCRIPTION, parser.add_argument
    add("--output", type=Path, metavar="FILE", help="where to write (default: standard output)")
    add("--optimizer", choices=("muon", "flexdemo"), default="muon", help="default: %(default)s")
    add("--sharding", choices=get_args(Sharding), default=Options.sharding, help="default: %(default)s")
    add("--replicate-size", type=_size, default="auto", metavar="N", help="replicas of the model, for flexdemo nodes")
    add("--shard-size", type=_size, default="auto", metavar="N", help="ranks that share each replica")
    add("--pipeline-size", type=count, default=1, metavar="N", help="ranks over which the layers are divided")
    add("--num-processes", type=count, metavar="N", help=_NUM_PROCESSES)
    add("--num-machines", type=count, default=1, metavar="N", help="default: %(default)s")
    add("--mixed-precision", choices=("no", "bf16"), default="bf16", help="default: %(default)s")
    add("--cpu", action="store_true", help="processes with gloo on the CPU")


def run(arguments: argparse.Namespace) -> None:
    """Write the file."""
    options = {key: getattr(arguments, key) for key in ("sharding", "replicate_size", "shard_size", "pipeline_size")}
    with_nodes = arguments.optimizer == "flexdemo"
    text = accelerate_config(
        options=options,
        optimizer=FlexDeMoConfig() if with_nodes else None,
        num_processes=arguments.num_processes,
        num_machines=arguments.num_machines,
        mixed_precision=arguments.mixed_precision,
        is_cpu=arguments.cpu,
        output=arguments.output,
    )
    if arguments.output is None:
        sys.stdout.write(text)
        return
    write_new(arguments.output, text)


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet, into an existing folder."""
    if path.exists():
        raise FileExistsError(f"{path} exists and is not overwritten; remove it, or name another file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for {path.name}; make it, or name another file")
    with path.open("x", encoding="utf-8") as file:
        file.write(text)


def accelerate_config(
    *,
    options: Mapping[str, Any],
    optimizer: FlexDeMoConfig | None,
    num_processes: int | None,
    num_machines: int,
    mixed_precision: str,
    is_cpu: bool,
    output: Path | None,
    accumulates: int = 1,
    checkpoints_activations: bool = False,
) -> str:
    """Text of a config file: what ``accelerate config`` would write, and our section.

    Args:
        options: Fields of :class:`~lightning_muon.engine.options.Options` that are set.
        optimizer: Config of a FlexDeMo; ``None`` for ParallelMuon with its defaults.
        num_processes: Number of processes on all machines; ``None`` for all devices.
        num_machines: Number of machines.
        mixed_precision: The name in Accelerate.
        is_cpu: Whether processes use gloo on the CPU.
        output: File that the first line names.
        accumulates: Number of batches of a step.
        checkpoints_activations: Whether FSDP2 recomputes its units in backward.

    Raises:
        ValueError: For numbers of processes that do not fit the sizes.
    """
    asked = {key: options.get(key, "auto") for key in ("replicate_size", "shard_size")}
    sharding, stages = options.get("sharding", Options.sharding), options.get("pipeline_size", 1)
    checked = Options(**{**options, "optimizer": Options.optimizer if optimizer is None else optimizer})
    processes = _num_processes(num_processes, num_machines, asked, stages, is_cpu=is_cpu)
    if sharding == "none" and processes > stages:
        raise ValueError(
            f"--sharding none is one process, got {processes}; add --num-processes {stages}, or use zero2 or ddp"
        )
    replicas, shards = checked.resolve(num_nodes=num_machines, num_processes=processes // num_machines)
    # Accelerate shards models only with several shards, and only on accelerators; a Trainer saves parts of a model that
    # other processes have only with FSDP.
    is_fsdp = sharding == "fsdp" and shards * stages > 1 and not is_cpu
    stock = _stock(processes, num_machines, mixed_precision, is_cpu=is_cpu, is_fsdp=is_fsdp)
    if accumulates > 1:
        stock["gradient_accumulation_steps"] = accumulates
    live = {key: value for key, value in options.items() if key not in (*asked, "sharding", "pipeline_size")}
    if is_fsdp:
        reshards = live.pop("reshard_after_forward", True)
        stock["fsdp_config"] = _fsdp_config(reshards=reshards, checkpoints_activations=checkpoints_activations)
        if stages == 1:  # Accelerate knows no ranks beside replicas and shards.
            sizes = {"parallelism_config_dp_replicate_size": replicas, "parallelism_config_dp_shard_size": shards}
            stock["parallelism_config"] = sizes
    live |= {} if sharding == "fsdp" else {"sharding": sharding}
    has_sizes = "parallelism_config" in stock or (sharding != "fsdp" and set(asked.values()) == {"auto"})
    if processes > 1 and not has_sizes:
        live |= {"replicate_size": replicas, "shard_size": shards}
    if stages > 1:
        live |= {"pipeline_size": stages}
    header = f"# Start a program with: lightning-muon launch --config_file {output or 'FILE'} program.py\n"
    section = "".join(_section(live, MuonConfig() if optimizer is None else optimizer))
    note = f"\n# Beside what Accelerate knows. A line without # changes a default.\n{SECTION}:\n"
    return header + yaml.safe_dump(stock, sort_keys=False) + note + section


def _fsdp_config(*, reshards: bool, checkpoints_activations: bool) -> dict[str, Any]:
    found = {"fsdp_version": 2, "fsdp_reshard_after_forward": reshards, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    return found | ({"fsdp_activation_checkpointing": True} if checkpoints_activations else {})


def _stock(processes: int, machines: int, mixed_precision: str, *, is_cpu: bool, is_fsdp: bool) -> dict[str, Any]:
    """Entries of Accelerate that do not depend on the sharding."""
    kind = "NO" if processes == 1 else f"MULTI_{'CPU' if is_cpu else 'GPU'}"
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_fsdp else kind,
        "mixed_precision": mixed_precision,
        "num_machines": machines,
        "num_processes": processes,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": is_cpu,
    }


def _num_processes(asked: int | None, machines: int, sizes: Mapping[str, Any], stages: int, *, is_cpu: bool) -> int:
    """Number of processes on all machines, the same number on each."""
    processes = asked
    if processes is None and "auto" not in sizes.values():
        processes = math.prod(sizes.values()) * stages
    elif processes is None:
        processes = max(stages, (0 if is_cpu else torch.cuda.device_count()) * machines, machines)
    if processes % machines:
        raise ValueError(f"--num-processes {processes} must be a multiple of --num-machines {machines}")
    return processes


def _section(live: Mapping[str, Any], optimizer: MuonConfig | FlexDeMoConfig) -> Iterator[str]:
    """Lines of our section: ``live`` are the options that are set; of the optimizer, those that are not defaults."""
    kind, is_chosen = type(optimizer), isinstance(optimizer, FlexDeMoConfig)
    for name, default, about in _options(Options):
        yield textwrap.indent(about, "  # ")
        yield _entry(name, live[name], "  ") if name in live else _entry(name, default, "  # ")
        if name == "optimizer":
            head = f"optimizer:\n  class_path: lightning_muon.{kind.__name__}\n  init_args:\n"
            yield textwrap.indent(head, "  " if is_chosen else "  # ")
            for key, inner, explained in _options(kind):
                value = getattr(optimizer, key)
                indent = "      # " if value == inner else "      "
                yield textwrap.indent(explained, "      # ") + _entry(key, value, indent)


def _options(kind: type[Any]) -> Iterator[tuple[str, Any, str]]:
    """(name, default, what its docstring says without the marks that Sphinx reads) of every field of a config."""
    about, made = option_docs(kind), kind()
    for field in fields(kind):
        text = re.sub(r":\w+:`~?([^`]+)`|``([^`]*)``", lambda found: found[1] or found[2], about[field.name])
        yield field.name, getattr(made, field.name), textwrap.fill(text, _WIDTH - 8) + "\n"


def _entry(name: str, value: Any, indent: str) -> str:
    # Dump a list, because YAML ends a document that is a scalar with three dots.
    text = yaml.safe_dump([plain(value)], default_flow_style=True, width=10**6).strip()[1:-1]
    return f"{indent}{name}: {text}\n"


def plain(value: Any) -> Any:
    """The value of an option as YAML has it."""
    if is_dataclass(value):
        arguments = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        return {"class_path": f"lightning_muon.{type(value).__name__}", "init_args": arguments}
    if isinstance(value, timedelta):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _size(text: str) -> int | str:
    return text if text == "auto" else count(text)
