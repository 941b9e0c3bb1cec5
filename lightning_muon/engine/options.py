"""Every option of a training and its default: the one list for Python, LightningCLI, Accelerate and Fabric.

From a YAML file objects are built here; errors name the file, the key and the nearest right one.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from argparse import ArgumentError
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Self, TypedDict, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_muon.config import (
    MuonConfig,
    check_flag,
    check_one_of,
    check_whole,
    from_arguments,
    takes_options,
    unknown_option,
)
from lightning_muon.engine.conversion import OptimizerChoice
from lightning_muon.engine.mesh_sizes import MeshSizes, SizeOrAuto
from lightning_muon.errors import UnknownOptionError
from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.pipeline.runtime import PipelineOptions
from lightning_muon.removed import removed_value
from lightning_muon.sharding.base import Accumulate, BucketBytes, ModeOptions, ShardingOptions
from lightning_muon.sharding.modes import MODES, Sharding
from lightning_muon.sharding.units import WrapPolicy

LossScaling = Literal["mean", "tokens"]
ClipGroups = Literal["all", "elementwise"]
SECTION = "lightning_muon"  # Section of a file that has the options of Accelerate, too.

_CONFIGS = (MuonConfig, FlexDeMoConfig)
# Options of FSDP2 that a pipeline decides.
_OF_UNITS = ("wrap_policy", "reshard_after_forward", "reshard_after_backward", "accumulate")


@takes_options()
@dataclass(frozen=True, kw_only=True)
class Options(ShardingOptions, PipelineOptions, MeshSizes):
    """The options of a training, beside its model and data.

    Example::

        options = Options(replicate_size=2, optimizer=MuonConfig(momentum=0.9))
        assert options == Options.from_mapping({"replicate_size": 2, "optimizer": {"momentum": 0.9}})

    Args:
        optimizer: What to make of the optimizer of the program. ``"auto"``: AdamW and Adam become ParallelMuon.
            Matrices get 3 times the learning rate, everything else keeps it. ``"keep"``: nothing is replaced. A config:
            as ``"auto"``, with its momentum, patterns and so on; a LightningModule without ``configure_optimizers``
            trains with it. A ``FlexDeMoConfig``: replicas are nodes that average gradients inside only, and a FlexDeMo
            exchanges components of momenta between them. A mapping of its keys stands for a config.
        sharding: ``"fsdp"``: parameters, gradients and state sharded (FSDP2, hybrid). ``"zero2"``: whole weights,
            sharded gradients and state. ``"ddp"``: replicas only. ``"none"``: one process.
        loss_scaling: ``"mean"``: gradients are averaged over the ranks. ``"tokens"``: the loss is a sum, and gradients
            are divided by the global number of tokens that the program reports.
        clip_groups: Which gradients are clipped: ``"all"``, or ``"elementwise"``, which leaves out matrices on Muon.
        save_distributed_checkpoint: A directory with the shards of each rank, or one file in the usual format.
            ``"auto"``: one file if weights and states have less than 2 GiB, and there is no pipeline.
        check_replicas_every_n_steps: After so many steps compare weights and optimizer state between the ranks
            that must have them alike (see docs/checkpoints.md); 0 never.
        async_save: Checkpoints are written while the training goes on, from a copy in the memory of the host.
        process_group_backend: ``None``: gloo for CPUs, NCCL for CUDA. ``CPUOffloadPolicy`` needs
            ``"cpu:gloo,cuda:nccl"``.
        timeout: Of collectives, on every axis of the mesh.
        max_silence: A rank that gives no sign of life for so long while others wait for it ends the run: those that are
            left log why and end with exit code 1. ``None``: four fifths of ``timeout``.

    Raises:
        TypeError: For a wrong keyword, with the nearest right one.
        ValueError: For a value that does not exist, or that the others cannot honour.
    """

    optimizer: OptimizerChoice = "auto"
    reshard_after_forward: bool = True  # ModeOptions also takes a number of ranks.
    sharding: Sharding = "fsdp"
    loss_scaling: LossScaling = "mean"
    clip_groups: ClipGroups = "all"
    save_distributed_checkpoint: bool | Literal["auto"] = "auto"
    check_replicas_every_n_steps: int = 0
    async_save: bool = False
    process_group_backend: str | None = None
    timeout: timedelta = timedelta(seconds=1800)  # That of torch.distributed, and of Lightning's other strategies.
    max_silence: timedelta | None = None

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, Mapping):
            object.__setattr__(self, "optimizer", build_class(self.optimizer, _CONFIGS, where="optimizer"))
        super().__post_init__()
        self._check_values()
        self._check_combinations()

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, source: str = "options") -> Self:
        """Options from what a YAML file holds, or from keyword arguments.

        Values take the forms that they have in a LightningCLI file: ``optimizer`` is ``{class_path: ..., init_args:
        {...}}``, or the keys of a ``MuonConfig`` or a ``FlexDeMoConfig`` themselves. Instances are taken as they are.
        Needs jsonargparse.

        Args:
            mapping: Name of an option -> value.
            source: What an error names.

        Raises:
            UnknownOptionError: For a wrong key at any depth, with the nearest right one.
            ValueError: For a wrong value.
        """
        if isinstance(mapping, Mapping):
            check_keys(mapping, [field.name for field in fields(cls)], where=source)
            if isinstance(given := mapping.get("optimizer"), Mapping):
                mapping = {**mapping, "optimizer": build_class(given, _CONFIGS, where=f"{source}: optimizer")}
        return build(cls, mapping, where=source)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Options from a YAML file: from its section ``lightning_muon``, or all of it if it has none.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: As :meth:`from_mapping`; names the file.
        """
        content = read_yaml(path)
        if SECTION in content:
            return cls.from_mapping(content[SECTION] or {}, source=f"{path}: {SECTION}")
        return cls.from_mapping(content, source=str(path))

    @property
    def mode_options(self) -> ModeOptions:
        """The options for :func:`lightning_muon.make_mode`, without ``mp_policy`` and others that the run decides."""
        return from_arguments(ModeOptions, vars(self) | {"decoupled_nodes": self.has_nodes})

    @property
    def config(self) -> MuonConfig | FlexDeMoConfig:
        """The config of ``optimizer``, or the default one."""
        return self.optimizer if isinstance(self.optimizer, MuonConfig | FlexDeMoConfig) else MuonConfig()

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Name and text of each option; ranks with equal options have equal texts."""
        named = [(field.name, getattr(self, field.name)) for field in fields(self)]
        # The order of a set, and addresses in memory, differ between processes.
        texts = [(key, sorted(map(repr, value)) if isinstance(value, Set) else repr(value)) for key, value in named]
        return [(key, re.sub(r" at 0x[0-9a-f]+", "", str(text))) for key, text in texts]

    @property
    def has_nodes(self) -> bool:
        """Whether replicas are nodes that a FlexDeMo keeps together."""
        return isinstance(self.optimizer, FlexDeMoConfig)

    def _check_values(self) -> None:
        check_one_of("sharding", self.sharding, tuple(MODES))
        check_one_of("accumulate", self.accumulate, get_args(Accumulate))
        check_one_of("clip_groups", self.clip_groups, get_args(ClipGroups))
        check_one_of("save_distributed_checkpoint", self.save_distributed_checkpoint, (True, False, "auto"))
        check_one_of("loss_scaling", self.loss_scaling, get_args(LossScaling))
        if self.optimizer not in ("auto", "keep") and not isinstance(self.optimizer, MuonConfig | FlexDeMoConfig):
            raise ValueError(
                f"optimizer must be 'auto', 'keep', a MuonConfig or a FlexDeMoConfig, got {self.optimizer!r}"
            )
        for field in fields(self):
            if isinstance(field.default, bool):
                check_flag(field.name, getattr(self, field.name))
        if self.bucket_bytes != "auto":
            check_whole("bucket_bytes", self.bucket_bytes, at_least=1, other="'auto' or ")
        check_whole("check_replicas_every_n_steps", self.check_replicas_every_n_steps, at_least=0)
        for name, value in (("timeout", self.timeout), ("max_silence", self.max_silence or timedelta(1))):
            if not (isinstance(value, timedelta) and value > timedelta(0)):
                raise ValueError(f"{name} must be a datetime.timedelta of more than 0 seconds, got {value!r}")

    def _check_combinations(self) -> None:
        """Raise ``ValueError`` for what ``sharding`` cannot honour, and replicas that cannot be nodes of a FlexDeMo."""
        self.check_pipeline(self.pipeline_size)
        if self.pipeline_size > 1 and "roots" not in MODES[self.sharding].takes:
            raise ValueError(
                f"pipeline_size={self.pipeline_size} needs sharding='fsdp' (or 'none' without data-parallel ranks), "
                f"got {self.sharding!r}, which reduces gradients in hooks that a backward in two parts does not call"
            )
        for key in _OF_UNITS if self.pipeline_size > 1 else ():
            if getattr(self, key) != getattr(Options, key):
                raise ValueError(
                    f"{key}={getattr(self, key)!r} means nothing with pipeline_size: the parts of a stage are its "
                    "units, and their whole weights stay until the gradients of a batch are reduced; remove it"
                )
        if self.pipeline_size > 1 and self.save_distributed_checkpoint is False:
            raise ValueError(
                "save_distributed_checkpoint=False does not go with pipeline_size, because no rank has all weights; "
                "save a directory, of which lightning-muon convert makes one file"
            )
        mode = MODES[self.sharding]
        if self.tensor_size > 1 and not mode.shards_weights:
            raise ValueError(f"tensor_size={self.tensor_size} needs sharding='fsdp', got {self.sharding!r}")
        for field in fields(ShardingOptions):
            key, value = field.name, getattr(self, field.name)
            if value != field.default and key not in mode.takes:
                takers = [name for name, other in MODES.items() if key in other.takes]
                raise ValueError(
                    f"{key}={value!r} means nothing with sharding={self.sharding!r}; remove it, or use one of {takers}"
                )
        if not self.has_nodes:
            return
        if "decoupled_nodes" not in mode.takes:
            raise ValueError(f"optimizer=FlexDeMoConfig(...) needs sharding='fsdp', got {self.sharding!r}")
        if self.tensor_size > 1:
            raise ValueError("optimizer=FlexDeMoConfig(...) needs the axes replicate (nodes) and shard, no tensor_size")


class StrategyOptions(TypedDict, total=False):
    """The fields of :class:`Options`, which strategies take as ``**options``, for editors."""

    replicate_size: SizeOrAuto
    shard_size: SizeOrAuto
    optimizer: OptimizerChoice
    wrap_policy: WrapPolicy
    reshard_after_forward: bool
    context_size: int
    tensor_size: int
    pipeline_size: int
    pipeline_schedule: str
    pipeline_microbatches: int | Literal["auto"]
    pipeline_split: Sequence[str] | None
    pipeline_stages_per_rank: int | Literal["auto"]
    reshard_after_backward: bool
    accumulate: Accumulate
    bucket_bytes: BucketBytes
    sharding: Sharding
    loss_scaling: LossScaling
    clip_groups: ClipGroups
    save_distributed_checkpoint: bool | Literal["auto"]
    check_replicas_every_n_steps: int
    async_save: bool
    process_group_backend: str | None
    timeout: timedelta
    max_silence: timedelta | None


T = TypeVar("T")

# Values of any other type are taken as they are; a mapping with `class_path` is built.
_PLAIN = (str, int, float, list, tuple, Mapping, type(None))
# Where a class_path without dots is looked up.
_PACKAGE = "lightning_muon"


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping that a YAML file holds, or a ``ValueError`` that names the file."""
    import yaml  # Comes with jsonargparse and with accelerate.

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML file: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"{path} must hold `key: value` lines, got {content!r}")
    return content or {}


def build(kind: type[T], mapping: Mapping[str, Any], *, where: str) -> T:
    """``kind(**mapping)``, with values converted to its types by jsonargparse; errors name ``where``."""
    from jsonargparse import ArgumentParser

    if not isinstance(mapping, Mapping):
        raise ValueError(f"{where}: must be a mapping of options, got {mapping!r}")
    parameters = list(inspect.signature(kind).parameters)
    check_keys(mapping, parameters, where=where, of=kind.__name__)
    plain, built = dict[str, Any](), dict[str, Any]()
    for key, value in mapping.items():
        if isinstance(value, Mapping) and "class_path" in value:
            declared = get_type_hints(kind.__init__).get(key)
            built[key] = build_class(value, _classes_in(declared), where=f"{where}: {key}")
        else:
            (plain if isinstance(value, _PLAIN) else built)[key] = value
    parser = ArgumentParser(exit_on_error=False)
    try:
        # Every type that jsonargparse looks at takes it milliseconds.
        parser.add_class_arguments(kind, skip=set[str | int](parameters) - plain.keys(), fail_untyped=False)
        parsed = parser.instantiate(parser.parse_object(plain))
    except (ArgumentError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: {removed_value(str(error)) or error}") from error
    for key, value in plain.items():
        of = parsed[key].__module__ if isinstance(value, str) and inspect.isroutine(parsed[key]) else None
        if (of or "").partition(".")[0] in sys.stdlib_module_names:
            raise ValueError(f"{where}: {key}: {value!r} is a function of Python itself; name one that is made for it")
    try:
        return kind(**{key: parsed[key] for key in plain}, **built)
    except ValueError as error:  # No TypeError, which may be a bug: whoever reads it needs the traceback.
        raise ValueError(f"{where}: {error}") from error


def build_class(value: Mapping[str, Any], kinds: Sequence[type[Any]], *, where: str) -> Any:
    """Build what ``{class_path, init_args}`` describes, one of ``kinds``; for arguments alone, that with most of them.

    The module of a ``class_path`` is imported, and no class of another kind is called.
    """
    if "class_path" in value:
        kind = _import_class(value["class_path"], where)
        if not issubclass(kind, tuple(kinds)):
            wanted = " or ".join(each.__name__ for each in kinds) or "class that this option takes"
            raise ValueError(f"{where}: class_path {value['class_path']!r} names no {wanted}")
        check_keys(value, ("class_path", "init_args"), where=where)
        return build(kind, value.get("init_args") or {}, where=where)
    parameters = {kind: list(inspect.signature(kind).parameters) for kind in kinds}
    best = max(kinds, key=lambda kind: sum(key in parameters[kind] for key in value))
    check_keys(value, parameters[best], where=f"{where} ({best.__name__})", of=best.__name__)
    return build(best, value, where=where)


def _classes_in(annotation: Any) -> list[type[Any]]:
    """The classes of this package in a declared type, maybe a union: of ``Callable``, nearly every class is one."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [each for each in members if isinstance(each, type) and each.__module__.startswith(f"{_PACKAGE}.")]


def check_keys(given: Collection[object], allowed: Sequence[str], *, where: str, of: str = "") -> None:
    """Raise ``UnknownOptionError`` for a key that the class ``of`` does not take."""
    for key in given:
        if key not in allowed:
            raise UnknownOptionError(f"{where}: {unknown_option(key, allowed, of=of)}")


def _import_class(path: object, where: str) -> type[Any]:
    module_name, _, name = str(path).rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name or _PACKAGE), name, None)
    except ImportError as error:
        raise ValueError(f"{where}: class_path {path!r} cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"{where}: class_path {path!r} names no class")
    return found
