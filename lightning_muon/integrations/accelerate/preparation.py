"""Tells the engine what Accelerate was told: meshes, and the model to shard."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch.distributed as dist
from accelerate.logging import get_logger
from accelerate.utils import fsdp2_apply_ac
from torch import nn

from lightning_muon.comm.agreement import together
from lightning_muon.engine.forward_methods import register_steps
from lightning_muon.engine.mesh_sizes import Meshes
from lightning_muon.engine.options import Options
from lightning_muon.engine.training import TrainingEngine
from lightning_muon.integrations.accelerate.settings import launched_layout, mesh_sizes, mode_options, sharding_of
from lightning_muon.sharding.fsdp_runtime import free_unsharded

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


def shard(accelerator: Any, module: nn.Module, meshes: Meshes) -> TrainingEngine:
    """Give all ranks the weights of the first one, and shard the model. Collective over all ranks.

    Every rank must call it.
    """
    options: Options = accelerator.options
    state = accelerator.state
    together(lambda: _check_module(module))
    free_unsharded(module)  # It may have been sharded and evaluated before.
    if accelerator.mixed_precision != "no":
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()  # As Accelerate does: the weights to train are float32.
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is not None and plugin.activation_checkpointing:
        plugin.set_auto_wrap_policy(module)
        fsdp2_apply_ac(accelerator, module)
    engine = TrainingEngine(
        module,
        options,
        meshes,
        sharding=sharding_of(state, options),
        mode_options=mode_options(state, options, module),
        info=_log.info,
        warn=_log.warning,
    )
    engine.shard(accelerator.device)
    engine.follow_forward()
    register_steps(module)
    return engine


def _check_module(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} is on the meta device; give all ranks real tensors (their values come "
                "from the first rank), for example with model.to_empty(device='cpu')"
            )
