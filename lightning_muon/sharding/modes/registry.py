"""The modes by name."""

from __future__ import annotations

from typing import Literal

from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.sharding.modes.ddp import Ddp
from lightning_muon.sharding.modes.fsdp import Fsdp
from lightning_muon.sharding.modes.mode import ModeOptions, ShardingMode
from lightning_muon.sharding.modes.none import Undivided
from lightning_muon.sharding.modes.zero2 import Zero2

Sharding = Literal["fsdp", "zero2", "ddp", "none"]
MODES: dict[str, type[ShardingMode]] = {mode.name: mode for mode in (Fsdp, Zero2, Ddp, Undivided)}


def make_mode(name: str, mesh: DeviceMesh, options: ModeOptions) -> ShardingMode:
    """The mode that users call ``name``.

    Raises:
        ValueError: For an unknown name.
    """
    check_mode(name)
    return MODES[name](mesh, options)


def check_mode(name: str) -> None:
    """Raise ``ValueError`` for an unknown name."""
    if name not in MODES:
        raise ValueError(f"sharding must be one of {tuple(MODES)}, got {name!r}")
