"""Divides the model of an Accelerator, and decides what becomes of its optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from accelerate.logging import get_logger
from accelerate.utils import fsdp2_apply_ac
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import require_equal, together
from lightning_muon.engine.conversion import (
    OptimizerProxy,
    ReplacedParameters,
    convert_optimizers,
    describe_optimizers,
    optimizer_warnings,
)
from lightning_muon.engine.forward_methods import register_steps
from lightning_muon.engine.mesh_sizes import Meshes
from lightning_muon.engine.options import Options
from lightning_muon.integrations.accelerate.settings import launched_layout, mesh_sizes, mode_options, sharding_of
from lightning_muon.integrations.accelerate.training import PreparedTraining
from lightning_muon.sharding.fsdp_runtime import free_unsharded
from lightning_muon.sharding.modes import make_mode

_log = get_logger(__name__)


def describe(options: Options) -> list[tuple[str, str]]:
    """Lines that are equal on all ranks if their options are."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return [(key, getattr(value, "__qualname__", None) or repr(value)) for key, value in values.items()]


def make_meshes(state: Any, options: Options) -> Meshes:
    """The meshes of a run. Collective over all ranks; every rank must call it.

    A program that runs in one process without a launcher gets a process group of one.

    Raises:
        ValueError: If the sizes do not fit each other, or the number of ranks.
    """
    sizes, layout = mesh_sizes(state, options), launched_layout(state.num_processes)
    sizes.resolve(**layout)
    if not dist.is_initialized():
        backend = options.process_group_backend or ("nccl" if state.device.type == "cuda" else "gloo")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return sizes.make(state.device.type, **layout)


def mesh_of(meshes: Meshes, options: Options) -> DeviceMesh:
    """The ranks with batches of their own; with FlexDeMo by nodes."""
    mesh = meshes.nodes if options.has_nodes else meshes.data
    assert mesh is not None, "Options refuse meshes without nodes"
    return mesh


def divide(accelerator: Any, module: nn.Module, meshes: Meshes) -> PreparedTraining:
    """Give all ranks the weights of the first one, and divide the model. Collective over all ranks.

    Every rank must call it.
    """
    options: Options = accelerator.options
    together(lambda: _check_module(module))
    free_unsharded(module)  # It may have been divided and evaluated before.
    if accelerator.mixed_precision != "no":
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()  # As Accelerate does: the weights to train are float32.
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.activation_checkpointing:
        plugin.set_auto_wrap_policy(module)
        fsdp2_apply_ac(accelerator, module)
    replaced = ReplacedParameters(module)
    state = accelerator.state
    mode = make_mode(sharding_of(state, options), mesh_of(meshes, options), mode_options(state, options, module))
    if not mode.shards_weights:
        module.to(accelerator.device)
    mode.prepare(module)
    register_steps(module)
    replaced.close(module)
    return PreparedTraining(
        module,
        mode,
        replaced,
        clip_groups=options.clip_groups,
        max_skipped_steps=options.config.max_skipped_steps,
        max_silence=options.max_silence,
    )


def attach(
    training: PreparedTraining, given: Sequence[torch.optim.Optimizer], schedulers: Sequence[Any], options: Options
) -> list[torch.optim.Optimizer]:
    """Return what becomes of the optimizers of a model. Collective over all ranks; every rank must call it.

    Args:
        training: The model.
        given: All optimizers that step it, made before or after it was divided.
        schedulers: Follow an optimizer that is replaced; others see its learning rates through their own.
        options: Those of the run.
    """
    for optimizer in given:
        training.replaced.rebind(optimizer, training.module)
    conversions = convert_optimizers(given, schedulers, training.module, choice=options.optimizer)
    kinds = [(f"optimizer {index}", conversion.summary) for index, conversion in enumerate(conversions)]
    require_equal(kinds, None, "what was given to prepare")
    used = [conversion.optimizer for conversion in conversions]
    try:
        proxies = [OptimizerProxy(old, new) for old, new in zip(given, used, strict=True) if new is not old]
        training.attach(used, proxies)
    except ValueError as error:
        if options.optimizer == "keep":
            error.add_note("The option optimizer='keep' has left it as it is; 'auto' makes a ParallelMuon of an AdamW.")
        raise
    _log.info(describe_optimizers(conversions))
    if note := training.gradient_note:
        _log.info(note)
    for message in optimizer_warnings(conversions, options.optimizer):
        _log.warning(message)
    return used


def _check_module(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} is on the meta device; give all ranks real tensors (their values come "
                "from the first rank), for example with model.to_empty(device='cpu')"
            )
