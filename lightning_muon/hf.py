"""For users of ``transformers.Trainer``: ``Trainer(optimizer_cls_and_kwargs=lightning_muon.hf.optimizer(lr=3e-4))``.

The optimizer that a Trainer gets for its model, a callback that measures its steps, and a Trainer that saves and
resumes what ``from_pretrained(distributed_config=...)`` has sharded.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from typing_extensions import override

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lightning_muon.hf needs transformers ({error}): pip install "lightning-muon[accelerate]" "transformers>=5"',
        name=error.name,
    ) from error

from lightning_muon.checkpoint.loading import Checkpoint
from lightning_muon.checkpoint.saving import Format, OptimizerState, Weights, save
from lightning_muon.comm.agreement import gather, warn_on_first_rank
from lightning_muon.comm.collectives import AxisGroup, axis_group
from lightning_muon.compat.torch import free_unsharded
from lightning_muon.compat.transformers import ShardedAtLoad, calling_trainer, is_sharded_at_load, mesh_of
from lightning_muon.config import MuonConfig, takes_options
from lightning_muon.engine.conversion import tell
from lightning_muon.math.checksum import checksums
from lightning_muon.monitor.step_monitor import StepMonitor
from lightning_muon.optim.parallel_muon import ParallelMuon
from lightning_muon.params.layout import parameters_of
from lightning_muon.params.routing import route_module, routing_table

__all__ = ["MuonMonitor", "Trainer", "optimizer"]
_log = logging.getLogger(__name__)
_DEFAULT = MuonConfig()
# Option of ours -> what TrainingArguments calls it.
_THEIRS = {
    "lr": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "betas": ("adam_beta1", "adam_beta2"),
    "adamw_eps": ("adam_epsilon",),
}


class TrainerMuon(ParallelMuon):
    """Has no state before its parameters are sharded, or its first step, like the optimizers of torch.

    ``Accelerator.prepare`` asks the optimizer of a Trainer for its ``state_dict``, and loads that back, before it
    shards the model. State that was made then would be that of whole parameters, and keep them alive.
    """

    def _can_make_state(self) -> bool:
        is_sharded = any(isinstance(param, DTensor) for group in self.param_groups for param in group["params"])
        return is_sharded and super()._can_make_state()

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._existing_state else torch.optim.Optimizer.state_dict(self)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._existing_state or state_dict["state"]:
            super().load_state_dict(state_dict)
        else:
            torch.optim.Optimizer.load_state_dict(self, state_dict)


class OptimizerFactory:
    """Makes the optimizer of a Trainer: ``OptimizerFactory()(model, config=config)``, as the Trainer calls it."""

    def __call__(
        self, model: nn.Module, *, config: MuonConfig, given: Collection[str] = (), has_config: bool = True
    ) -> ParallelMuon:
        """An optimizer for what trains of ``model``. Collective with DDP."""
        config = _with_arguments(config, calling_trainer(), given, has_config=has_config)
        require_one_sharding(model)
        mesh = _mesh_of_replicas()
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        no_trainer: Any = None  # The method reads the model alone: all but biases and what belongs to a norm.
        decayed = set(transformers.Trainer.get_decay_parameter_names(no_trainer, model))
        groups: list[dict[str, Any]] = [
            {"params": [parameter for name, parameter in named if name in decayed]},
            {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
        ]
        optimizer = TrainerMuon.from_config([group for group in groups if group["params"]], config, mesh=mesh)
        if mesh is not None:
            _require_averaged_gradients(optimizer, axis_group(mesh, (0,)))
        if not dist.is_initialized() or dist.get_rank() == 0:
            rows = zip(route_module(model, config).values(), model.parameters(), strict=True)
            table = routing_table([(route, tuple(p.shape), not p.requires_grad) for route, p in rows])
            rates = sorted({group["muon_lr_factor"] for group in optimizer.param_groups})
            times = " and ".join(f"{rate:g}" for rate in rates)
            tell(_log, f"Optimizer: ParallelMuon for matrices, at {times} times lr, AdamW for the rest\n{table}")
        # Not as an argument of the constructor: it would remember the parameters, which FSDP2 replaces.
        optimizer.route(model)
        return optimizer


def optimizer(config: MuonConfig = _DEFAULT, **options: Any) -> tuple[type[OptimizerFactory], dict[str, Any]]:
    """ParallelMuon for a ``transformers.Trainer``.

    Example::

        import lightning_muon.hf

        trainer = Trainer(
            model,
            TrainingArguments("out"),
            train_dataset=dataset,
            optimizer_cls_and_kwargs=lightning_muon.hf.optimizer(lr=3e-4, weight_decay=0.1),
        )

    ``TrainingArguments`` count; ``learning_rate``, ``weight_decay`` and ``adam_*`` do where they are not given here. A
    warning names what is given in both places, and an ``optim`` that is not the default.

    Args:
        config: A :class:`~lightning_muon.MuonConfig`. FlexDeMo is an option of ``lightning-muon launch``.
        **options: Fields of the config to change.

    Raises:
        TypeError: For an option that the config does not have.
    """
    if not isinstance(config, MuonConfig):
        raise TypeError(
            f"config must be a MuonConfig, got {config!r} (a FlexDeMoConfig is the option `optimizer` of the file that "
            "`lightning-muon launch` reads, and needs nothing here)"
        )
    own = {field.name for field in fields(config) if getattr(config, field.name) != getattr(_DEFAULT, field.name)}
    return OptimizerFactory, {
        "config": replace(config, **options),
        "given": own | options.keys(),
        "has_config": config is not _DEFAULT,
    }


def _with_arguments(config: MuonConfig, trainer: Any, given: Collection[str], *, has_config: bool) -> MuonConfig:
    """The config with ``TrainingArguments`` in place of what the user has not given; warns on rank 0."""
    if not isinstance(trainer, transformers.Trainer):
        return config
    defaults = {field.name: field.default for field in fields(transformers.TrainingArguments)}
    taken, ignored = dict[str, Any](), list[str]()
    for name, keys in _THEIRS.items():
        theirs = {key: getattr(trainer.args, key) for key in keys}
        value = tuple(theirs.values()) if name == "betas" else theirs[keys[0]]
        is_set = any(value != defaults[key] for key, value in theirs.items())
        if name not in given and (is_set or not has_config):
            taken[name] = value
        elif name in given and is_set and value != getattr(config, name):
            said = ", ".join(f"{key}={value!r}" for key, value in theirs.items())
            ignored.append(f"{said}: hf.optimizer was given {name}={getattr(config, name)!r}")
    optim: Any = trainer.args.optim
    if optim != defaults["optim"]:
        ignored.append(f"optim={getattr(optim, 'value', optim)!r}: the optimizer is that of hf.optimizer")
    if ignored:
        text = f"TrainingArguments have values without effect; leave one of both out. {'; '.join(ignored)}"
        warn_on_first_rank(text, stacklevel=3)
    return replace(config, **taken)


def require_one_sharding(model: Any) -> None:
    """Raise if both transformers and Accelerate shard the model; local, alike on all ranks."""
    from accelerate.utils import parse_flag_from_env  # accelerate is an optional extra.

    if is_sharded_at_load(model) and parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ValueError(
            "from_pretrained(distributed_config=...) has sharded the model, and Accelerate is to shard it again; start "
            "the program with torchrun, or accelerate launch without FSDP (or leave out distributed_config)"
        )


def _mesh_of_replicas() -> DeviceMesh | None:
    """All ranks if they divide the work, having averaged gradients (DDP). Then collective."""
    from accelerate.state import AcceleratorState, DistributedType  # accelerate is an optional extra.

    from lightning_muon.integrations.accelerate.settings import check_kind

    state = AcceleratorState()
    check_kind(state)
    if state.distributed_type in (DistributedType.NO, DistributedType.FSDP):
        return None
    return init_device_mesh(state.device.type, (state.num_processes,), mesh_dim_names=("replicate",))


def _require_averaged_gradients(optimizer: ParallelMuon, ranks: AxisGroup) -> None:
    """Let the first step raise unless all ranks have the same gradients; that step is collective over ``ranks``."""
    has_checked = False  # A hook that removes itself breaks the loop over the hooks.

    def check(*_: Any) -> None:
        nonlocal has_checked
        if has_checked:
            return
        has_checked = True
        gradients = [each.grad for each in parameters_of(optimizer)]
        # Shards of a model that from_pretrained has divided are reduced by what divided it.
        whole = [each for each in gradients if each is not None and not isinstance(each, DTensor)]
        found = checksums(whole).tolist()
        if any(other != found for other in gather(found, ranks)):
            raise RuntimeError(
                "the ranks have different gradients, which nothing averages: the model is not in "
                "DistributedDataParallel. After Trainer.evaluate() or predict(), Trainer.train() of transformers "
                "leaves it out; call train() first, or start the program with `lightning-muon launch`"
            )

    optimizer.register_step_pre_hook(check)


@takes_options()
class MuonMonitor(transformers.TrainerCallback):
    """Measures every n-th optimizer step of a ``Trainer``, and logs what it found with the Trainer's ``log``.

    docs/monitor.md says what each number means.

    Args:
        trainer: The Trainer that gets the callback.
        every_n_steps: Measure every so many optimizer steps.

    Example::

        trainer = Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=lightning_muon.hf.optimizer())
        trainer.add_callback(lightning_muon.hf.MuonMonitor(trainer))
    """

    def __init__(self, trainer: Any, every_n_steps: int = 50) -> None:
        self._trainer, self._every_n_steps = trainer, every_n_steps
        self._monitor: StepMonitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Begin. Collective over all ranks."""
        optimizer, first_step = of_trainer["optimizer"], state.global_step
        self._monitor = StepMonitor(optimizer, every_n_steps=self._every_n_steps, first_step=first_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log what the step has given, if it was measured."""
        if self._monitor is not None and (values := self._monitor.take()):
            should_log = control.should_log
            self._trainer.log(values)
            control.should_log = should_log  # Or the loss of this step would not be logged any more.

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Measure no more."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None


_FOLDER, _METADATA = "sharded", "meta.pt"  # In a folder checkpoint-N, beside the whole weights.
_MODEL, _OPTIMIZER, _SCHEDULER = "model", "optimizer", "scheduler"


class Trainer(ShardedAtLoad, transformers.Trainer):
    """A ``transformers.Trainer`` that saves the state of the optimizer also for models sharded at load time.

    ``from_pretrained(distributed_config=...)`` shards a model as it loads it (FSDP2, HSDP, tensor parallel), and the
    Trainer of transformers then refuses to save the optimizer and to resume. This one writes model and optimizer as
    shards to ``checkpoint-N/sharded``, with hashes, and ``train(resume_from_checkpoint=...)`` reads them on any number
    of ranks and any mesh. ``checkpoint-N`` itself still is a folder for ``from_pretrained``. Any other model is saved
    as transformers does it. Arguments are those of ``transformers.Trainer``.

    Example::

        model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(fsdp_size=8))
        muon = lightning_muon.hf.optimizer()
        trainer = lightning_muon.hf.Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=muon)
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(self, model: Any = None, args: Any = None, *more: Any, **options: Any) -> None:
        require_one_sharding(model)
        super().__init__(model, args, *more, **options)

    def _parts(self) -> dict[str, Any]:
        model: Any = self.model
        free_unsharded(model)  # An evaluation leaves the root whole.
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it.
        return {
            _MODEL: Weights(model, mesh_of(model), [optimizer]),
            _OPTIMIZER: OptimizerState(model, optimizer),
            _SCHEDULER: self.lr_scheduler,
        }

    @override
    def save_states(self, folder: Path) -> None:
        how = Format(whole=False, metadata_name=_METADATA)
        save({folder / _FOLDER: self._parts()}, how)

    @override
    def load_weights(self, folder: Path) -> None:
        parts = self._parts()
        self._open(folder).load({_MODEL: parts[_MODEL]}, {}, strict=True)

    @override
    def load_states(self, folder: Path) -> None:
        parts = self._parts()
        self._open(folder).load({key: parts[key] for key in (_OPTIMIZER, _SCHEDULER)}, {}, strict=True)

    def _open(self, folder: Path) -> Checkpoint:
        """Collective over all ranks."""
        return Checkpoint.open(folder / _FOLDER, metadata_name=_METADATA, weights_only=True)
