"""The sharding modes by name."""

from __future__ import annotations

from typing import Literal

from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.sharding.base import ModeOptions, ShardingMode
from lightning_muon.sharding.fsdp import Fsdp
from lightning_muon.sharding.replicas import Ddp, SingleProcess
from lightning_muon.sharding.zero2 import Zero2

Sharding = Literal["fsdp", "zero2", "ddp", "none"]
MODES: dict[str, type[ShardingMode]] = {mode.name: mode for mode in (Fsdp, Zero2, Ddp, SingleProcess)}


def make_mode(name: str, mesh: DeviceMesh, options: ModeOptions) -> ShardingMode:
    """Make the mode called ``name``."""
    if name not in MODES:
        raise ValueError(f"sharding must be one of {tuple(MODES)}, got {name!r}")
    return MODES[name](mesh, options)
