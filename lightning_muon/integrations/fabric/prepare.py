"""Gives a module of a Fabric program its final form: memory, the same weights on all ranks, shards."""

from __future__ import annotations

import torch
from torch import nn

from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.engine.forward_methods import register_steps
from lightning_muon.engine.model_setup import (
    has_meta_tensors,
    materialize_user_sharded,
    materialize_whole,
    shard_units_from_meta,
)
from lightning_muon.sharding.mode import ShardingMode


def prepare(module: nn.Module, mode: ShardingMode, *, device: torch.device, package: LightningPackage) -> None:
    """Divide ``module`` in place. Collective over the mesh of ``mode``; every rank must call it.

    Args:
        module: The user's; what is on the meta device, as with ``fabric.init_module(empty_init=True)``, is initialized
            unit by unit.
        mode: How to divide it.
        device: Of new tensors.
        package: Beside the Fabric that is used.
    """
    if has_meta_tensors(module):
        warn = package.fabric("utilities.rank_zero").rank_zero_warn
        if mode.shards_weights:
            materialize_user_sharded(module, device, package)
            shard_units_from_meta(module, mode.mesh, mode.options, device=device, warn=warn)
        else:
            materialize_whole(module, device, warn)
    mode.prepare(module)
    # ``generate`` of models inside of the module; a method of the module itself goes through Entry.
    for child in module.children():
        register_steps(child)
