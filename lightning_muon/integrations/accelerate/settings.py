"""What Accelerate was told about a run, in the words of this package: options, meshes, precision, units, the model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, fsdp2_apply_ac
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from lightning_muon.comm.agreement import gather
from lightning_muon.compat.torch import free_unsharded
from lightning_muon.engine.mesh_sizes import Meshes, MeshSizes
from lightning_muon.engine.model_setup import mixed_precision_policy, register_steps, require_precision
from lightning_muon.engine.options import Options
from lightning_muon.engine.session import Session
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import Sharding
from lightning_muon.sharding.units import WrapPolicy

CONFIG_VARIABLE = "LIGHTNING_MUON_CONFIG"
_OTHER_NAMES = {"replicate_size": "dp_replicate_size", "shard_size": "dp_shard_size"}


def read_options(options: Options | Mapping[str, Any] | str | Path | None) -> Options:
    """Options in one form; ``None`` is the file that ``LIGHTNING_MUON_CONFIG`` names, or the defaults."""
    if options is None:
        options = os.environ.get(CONFIG_VARIABLE) or Options()
    if isinstance(options, Options):
        return options
    if isinstance(options, str | Path):
        return Options.from_file(options)
    if isinstance(options, Mapping):
        return Options.from_mapping(options)
    raise TypeError(f"options must be Options, a mapping or the path of a YAML file, got {options!r}")


def check_kind(state: Any) -> None:
    """Raise ``ValueError`` for a kind of Accelerator, or a precision, that Muon cannot work with."""
    kind = state.distributed_type
    if kind not in (DistributedType.FSDP, DistributedType.NO) and not kind.value.startswith("MULTI_"):
        raise ValueError(
            f"distributed_type: {kind.value} brings a division of its own; use FSDP with fsdp_version: 2, or MULTI_GPU"
        )
    if kind == DistributedType.FSDP and not state.is_fsdp2:
        raise ValueError("FSDP1 flattens parameters, so that no matrix is left for Muon; set fsdp_version: 2")
    precision = state.mixed_precision
    require_precision(precision, f"mixed_precision: {precision}", ("no", "bf16"))


def check_state(state: Any, options: Options) -> None:
    """Raise ``ValueError`` for what the ``AcceleratorState`` was told and the engine cannot honour."""
    check_kind(state)
    if options.pipeline_size > 1:
        raise ValueError(
            f"pipeline_size={options.pipeline_size}: no loop of Accelerate, and no Trainer of transformers, trains a "
            "pipeline; use ParallelMuonStrategy of Lightning, or ParallelMuonFabricStrategy of Fabric with "
            "lightning_muon.forward_backward in place of the model's call and of backward (see docs/pipelines.md)"
        )
    if options.process_group_backend is not None or options.timeout != Options.timeout:
        raise ValueError("process_group_backend, timeout: give Accelerate's InitProcessGroupKwargs in kwargs_handlers")
    is_fsdp, num_launched = state.distributed_type == DistributedType.FSDP, int(os.environ.get("WORLD_SIZE", "1"))
    if state.distributed_type == DistributedType.NO and num_launched > 1:
        raise ValueError(
            f"{num_launched} processes were launched, of which Accelerate knows one; on CPUs use MULTI_CPU"
        )
    if is_fsdp and options.sharding != "fsdp":
        raise ValueError(
            f"sharding={options.sharding!r} contradicts distributed_type: FSDP; MULTI_GPU goes with every sharding"
        )
    if is_fsdp:
        plugin = state.fsdp_plugin
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            raise ValueError("fsdp_offload_params: true is not supported; remove it, or shard over more ranks")
        if plugin.ignored_modules is not None:
            raise ValueError("fsdp_ignored_modules is not supported; freeze them, or take them out of the model")
        if plugin.activation_checkpointing and plugin.auto_wrap_policy is None:
            raise ValueError(
                "fsdp_activation_checkpointing: true drops activations where an fsdp_auto_wrap_policy says; set one"
            )
    for key in ("context_size", "tensor_size"):
        if getattr(options, key) > 1:
            raise ValueError(
                f"{key}={getattr(options, key)}: Accelerate would give the ranks that share a sample different ones"
            )


def sharding_of(state: Any, options: Options) -> Sharding:
    """How to shard: as the options say, but not at all in a single process that Accelerate knows no FSDP in."""
    is_alone = state.num_processes == 1 and state.distributed_type != DistributedType.FSDP
    return "none" if is_alone and options.sharding == "fsdp" and not options.has_nodes else options.sharding


def mesh_sizes(state: Any, options: Options) -> MeshSizes:
    """The sizes of the mesh: those of ``parallelism_config``, else those of the options; they may not contradict."""
    config = state.parallelism_config
    if config is None:
        return options
    for name in ("tp", "cp", "sp"):
        size = getattr(config, f"{name}_size")
        if size > 1:
            raise ValueError(
                f"parallelism_config_{name}_size: {size} is not supported here; use ParallelMuonStrategy of Lightning"
            )
    if state.distributed_type != DistributedType.FSDP:
        # There Accelerate itself fills in that all ranks are replicas, which says nothing of what the user wants.
        if config.dp_shard_size > 1:
            raise ValueError(
                f"parallelism_config_dp_shard_size: {config.dp_shard_size} needs distributed_type: FSDP, version 2"
            )
        return options
    theirs = {key: getattr(config, other) for key, other in _OTHER_NAMES.items()}
    if set(theirs.values()) == {1}:
        return options
    for key, other in _OTHER_NAMES.items():
        if getattr(options, key) not in ("auto", theirs[key]):
            raise ValueError(
                f"{key}={getattr(options, key)} contradicts parallelism_config_{other}: {theirs[key]}; give one"
            )
    return replace(options, **theirs)


def mode_options(state: Any, options: Options, module: nn.Module) -> ModeOptions:
    """What the sharding mode is told; the FSDP section of an accelerate config counts where the options are silent."""
    plugin = getattr(state, "fsdp_plugin", None)
    precision = "bf16-mixed" if state.mixed_precision == "bf16" else "32-true"
    chosen = replace(
        options.mode_options,
        mp_policy=mixed_precision_policy(precision, module),
        wait_for_parameters=True,  # The loop is the user's, and may read weights right after a step.
    )
    if plugin is None:
        return chosen
    # Accelerate's own policy for bf16 also reduces gradients in bfloat16, and hands bfloat16 out of the model.
    of_accelerate = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    if plugin.mixed_precision_policy not in (None, of_accelerate):
        chosen = replace(chosen, mp_policy=plugin.mixed_precision_policy)
    units: WrapPolicy = tuple(plugin.transformer_cls_names_to_wrap or ())
    if not units and plugin.min_num_params:
        units = partial(_is_larger, plugin.min_num_params)
    if units and options.wrap_policy != "auto":
        raise ValueError(
            f"wrap_policy={options.wrap_policy!r} and fsdp_auto_wrap_policy both name the units; give only one"
        )
    chosen = replace(chosen, wrap_policy=units or options.wrap_policy)
    return replace(chosen, reshard_after_forward=options.reshard_after_forward and plugin.reshard_after_forward)


def launched_sizes(num_processes: int) -> dict[str, int]:
    """Nodes, and processes on each, as the launcher has told them."""
    on_this_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))
    if num_processes % on_this_node:
        on_this_node = num_processes
    return {"num_nodes": num_processes // on_this_node, "num_processes": on_this_node}


def make_meshes(state: Any, options: Options) -> Meshes:
    """The meshes of a run. Collective over all ranks."""
    sizes, launched = mesh_sizes(state, options), launched_sizes(state.num_processes)
    if not dist.is_initialized():  # One process without a launcher.
        backend = "nccl" if state.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return sizes.make(state.device.type, by_nodes=options.has_nodes, **launched)


def shard(accelerator: Any, session: Session, module: nn.Module) -> None:
    """Give all ranks the weights of the first one, and shard the model. Collective over all ranks."""
    options, state = session.options, accelerator.state
    _give_memory(module)
    free_unsharded(module)  # It may have been sharded and evaluated before.
    if accelerator.mixed_precision != "no":
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()  # As Accelerate does: the weights to train are float32.
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is not None and plugin.activation_checkpointing:
        plugin.set_auto_wrap_policy(module)
        fsdp2_apply_ac(accelerator, module)
    chosen, kind = mode_options(state, options, module), sharding_of(state, options)
    session.shard(module, accelerator.device, mode_options=chosen, sharding=kind).follow_forward()
    register_steps(module)


def _give_memory(module: nn.Module) -> None:
    """Give memory to what waits on the meta device: ``fsdp_cpu_ram_efficient_loading`` makes values on rank 0 alone.

    Collective over all ranks; the values follow.
    """
    waiting = {name: t for name, t in (*module.named_parameters(), *module.named_buffers()) if t.is_meta}
    if of_first := gather({name: tuple(tensor.shape) for name, tensor in waiting.items()}, None)[0]:
        name, shape = next(iter(of_first.items()))
        raise ValueError(
            f"{name} {shape} is on the meta device on rank 0, too, whose values all ranks get; load or initialize the "
            "model there before prepare"
        )
    for tensor in waiting.values():
        empty = torch.zeros_like(tensor, device="cpu")
        # An optimizer may have it already.
        torch.utils.swap_tensors(tensor, nn.Parameter(empty, tensor.requires_grad) if tensor.requires_grad else empty)


def _is_larger(num_parameters: int, _: str, module: nn.Module) -> bool:
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and sum(parameter.numel() for parameter in module.parameters()) > num_parameters
