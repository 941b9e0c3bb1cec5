"""``lightning-muon config``: a config file of accelerate with our options in it, for ``lightning-muon launch``."""

from __future__ import annotations

import argparse
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

from lightning_muon.cli.plan_model import count
from lightning_muon.config import MuonConfig, option_docs
from lightning_muon.engine.options import SECTION, Options
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.sharding.modes import Sharding

_DESCRIPTION = """Write a config file of accelerate with a section lightning_muon, in which every option is a comment
with its default. Start a program with it, as it is: lightning-muon launch --config_file FILE program.py"""
_OPTIMIZERS: dict[str, type[Any]] = {"muon": MuonConfig, "flexdemo": FlexDeMoConfig}
_WIDTH = 110
_NUM_PROCESSES = (
    "on all machines (default: replicas x shards x stages if both are given, else a device of this one each)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description, add = _DESCRIPTION, parser.add_argument
    add("--output", type=Path, metavar="FILE", help="where to write (default: standard output)")
    add("--optimizer", choices=tuple(_OPTIMIZERS), default="muon", help="default: %(default)s")
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
    text = _config_file(arguments)
    if arguments.output is None:
        sys.stdout.write(text)
        return
    with arguments.output.open("x", encoding="utf-8") as file:
        file.write(text)


def _config_file(arguments: argparse.Namespace) -> str:
    """What ``accelerate config`` would write, and our section."""
    with_nodes, is_cpu, machines = arguments.optimizer == "flexdemo", arguments.cpu, arguments.num_machines
    stages = arguments.pipeline_size
    asked = {"replicate_size": arguments.replicate_size, "shard_size": arguments.shard_size}
    options = Options(
        sharding=arguments.sharding,
        optimizer=FlexDeMoConfig() if with_nodes else Options.optimizer,
        pipeline_size=stages,
        **asked,
    )
    processes = arguments.num_processes
    if processes is None and "auto" not in asked.values():
        processes = arguments.replicate_size * arguments.shard_size * stages
    elif processes is None:
        processes = max(stages, (0 if is_cpu else torch.cuda.device_count()) * machines, machines)
    if processes % machines:
        raise ValueError(f"--num-processes {processes} must be a multiple of --num-machines {machines}")
    if arguments.sharding == "none" and processes > stages:
        raise ValueError(
            f"--sharding none is one process, got {processes}; add --num-processes {stages}, or use zero2 or ddp"
        )
    replicas, shards = options.resolve(num_nodes=machines, num_processes=processes // machines)
    # Accelerate shards models only where they have several shards, and only on accelerators; a Trainer saves only with
    # FSDP what one process does not have.
    is_fsdp = arguments.sharding == "fsdp" and shards * stages > 1 and not is_cpu
    kind = "NO" if processes == 1 else f"MULTI_{'CPU' if is_cpu else 'GPU'}"
    stock: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_fsdp else kind,
        "mixed_precision": arguments.mixed_precision,
        "num_machines": machines,
        "num_processes": processes,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": is_cpu,
    }
    if is_fsdp:
        stock["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        if stages == 1:  # Accelerate knows no ranks beside replicas and shards.
            stock["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": replicas,
                "parallelism_config_dp_shard_size": shards,
            }
    live: dict[str, Any] = {} if arguments.sharding == "fsdp" else {"sharding": arguments.sharding}
    has_sizes = "parallelism_config" in stock or (arguments.sharding != "fsdp" and set(asked.values()) == {"auto"})
    if processes > 1 and not has_sizes:
        live |= {"replicate_size": replicas, "shard_size": shards}
    if stages > 1:
        live |= {"pipeline_size": stages}
    header = f"# Start a program with: lightning-muon launch --config_file {arguments.output or 'FILE'} program.py\n"
    section = "".join(_section(live, _OPTIMIZERS[arguments.optimizer], is_chosen=with_nodes))
    note = f"\n# Beside what Accelerate knows. A line without # changes a default.\n{SECTION}:\n"
    return header + yaml.safe_dump(stock, sort_keys=False) + note + section


def _section(live: Mapping[str, Any], optimizer: type[Any], *, is_chosen: bool) -> Iterator[str]:
    """Lines of our section: ``live`` are options that are set, ``is_chosen`` that the optimizer is no comment."""
    for name, default, about in _options(Options):
        yield textwrap.indent(about, "  # ")
        yield _entry(name, live[name], "  ") if name in live else _entry(name, default, "  # ")
        if name == "optimizer":
            head = f"optimizer:\n  class_path: lightning_muon.{optimizer.__name__}\n  init_args:\n"
            yield textwrap.indent(head, "  " if is_chosen else "  # ")
            for key, inner, explained in _options(optimizer):
                yield textwrap.indent(explained, "      # ") + _entry(key, inner, "      # ")


def _options(kind: type[Any]) -> Iterator[tuple[str, Any, str]]:
    """(name, default, what its docstring says without the marks that Sphinx reads) of every field of a config."""
    about, made = option_docs(kind), kind()
    for field in fields(kind):
        text = re.sub(r":\w+:`~?([^`]+)`|``([^`]*)``", lambda found: found[1] or found[2], about[field.name])
        yield field.name, getattr(made, field.name), textwrap.fill(text, _WIDTH - 8) + "\n"


def _entry(name: str, value: Any, indent: str) -> str:
    # In a list, because YAML ends a scalar that is a document of its own with three dots.
    text = yaml.safe_dump([_plain(value)], default_flow_style=True, width=10**6).strip()[1:-1]
    return f"{indent}{name}: {text}\n"


def _plain(value: Any) -> Any:
    """A default as YAML has it."""
    if is_dataclass(value):
        arguments = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"class_path": f"lightning_muon.{type(value).__name__}", "init_args": arguments}
    if isinstance(value, timedelta):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _size(text: str) -> int | str:
    return text if text == "auto" else count(text)
