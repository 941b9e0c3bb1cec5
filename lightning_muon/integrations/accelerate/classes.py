"""``lightning_muon.accelerate.Accelerator``, and ``prepare``, which makes a stock Accelerator one of ours."""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.utils import DistributedType

from lightning_muon.compat.accelerate import prepared_models
from lightning_muon.engine.options import Options
from lightning_muon.integrations.accelerate.accelerator import MuonAccelerator, OptionsLike
from lightning_muon.integrations.accelerate.settings import read_options, sharding_of


class Accelerator(MuonAccelerator, accelerate.Accelerator):
    """An ``accelerate.Accelerator`` that divides the model with this package, and trains it with ParallelMuon.

    Mesh and precision are those of the accelerate config (``fsdp_version: 2``, ``parallelism_config``,
    ``mixed_precision``); see :class:`~lightning_muon.integrations.accelerate.accelerator.MuonAccelerator` for what else
    it takes.

    Example::

        accelerator = lightning_muon.accelerate.Accelerator(options={"optimizer": {"momentum": 0.9}})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # becomes a ParallelMuon
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    """


class TrainerAccelerator(Accelerator):
    """That of a ``transformers.Trainer``, which saves and loads with functions of its own."""

    def use_options(self, options: Options, error: Exception | None = None) -> None:
        """As in the base class; refuses a division of which the Trainer knows nothing."""
        kind, sharding = self.state.distributed_type, sharding_of(self.state, options)
        if kind != DistributedType.FSDP and (options.has_nodes or sharding not in ("ddp", "none")):
            what = "FlexDeMo" if options.has_nodes else f"sharding={sharding!r}"
            error = error or ValueError(
                f"with distributed_type: {kind.value} a Trainer saves what one process has, which is not everything "
                f"with {what}; set distributed_type: FSDP and fsdp_version: 2, or sharding: ddp in the section "
                "lightning_muon"
            )
        super().use_options(options, error)


def class_over(base: type[Any]) -> type[Any]:
    """A class that does what ours does on top of ``base``, an Accelerator or a subclass of it."""
    if issubclass(base, MuonAccelerator):
        return base
    if base is accelerate.Accelerator:
        return Accelerator
    return type(base.__name__, (MuonAccelerator, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def prepare(
    accelerator: Any, *args: Any, options: OptionsLike = None, device_placement: list[bool | None] | None = None
) -> Any:
    """As ``accelerator.prepare(*args)`` of our Accelerator, for one that was made by ``accelerate.Accelerator(...)``.

    The Accelerator becomes one of ours: ``backward``, ``no_sync``, ``clip_grad_norm_``, ``save_state`` and so on do
    what :class:`Accelerator` says. Collective over all ranks; every rank must call it.

    Example::

        model, optimizer = lightning_muon.accelerate.prepare(accelerator, model, optimizer)

    Args:
        accelerator: One that has prepared no model yet, or one of ours.
        *args: A model, its optimizers, schedulers, data loaders.
        options: As in :class:`Accelerator`.
        device_placement: As in ``accelerate.Accelerator.prepare``.

    Raises:
        ValueError: If the Accelerator has prepared a model in its own way, or has options already.
    """
    if not isinstance(accelerator, MuonAccelerator):
        _convert(accelerator, options)
    elif options is not None:
        raise ValueError("options were given to prepare, but the Accelerator has its own already; give them to one")
    return accelerator.prepare(*args, device_placement=device_placement)


def _convert(accelerator: Any, options: OptionsLike) -> None:
    if prepared_models(accelerator):
        raise ValueError(
            f"this {type(accelerator).__name__} has prepared a model already; call lightning_muon.accelerate.prepare "
            "in place of accelerator.prepare"
        )
    error: Exception | None = None
    read = Options()
    try:
        read = read_options(options)
        if read.process_group_backend is not None or read.timeout != Options.timeout:
            raise ValueError(
                "process_group_backend and timeout come too late for an Accelerator that has its process group; give "
                "an InitProcessGroupKwargs to it, or use lightning_muon.accelerate.Accelerator"
            )
    except Exception as problem:  # Another rank may see another file; use_options tells it.
        error = problem
    accelerator.__class__ = class_over(type(accelerator))
    accelerator.use_options(read, error)
