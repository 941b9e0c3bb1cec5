"""Which options of the strategy go together."""

from __future__ import annotations

from typing import get_args

from lightning_muon.integrations.lightning.gradient_rules import check_clip_groups
from lightning_muon.integrations.lightning.running_strategy import LossScaling
from lightning_muon.sharding.modes.mode import ModeOptions
from lightning_muon.sharding.modes.registry import check_mode

# Options that only FSDP2 has, by their names in the strategy.
_OF_FSDP = ("reshard_after_forward", "reshard_after_backward", "early_all_gather")


def check_options(
    sharding: str, options: ModeOptions, loss_scaling: str, clip_groups: str, *, num_tensor_ranks: int
) -> None:
    """Raise ``ValueError`` for a value that does not exist, or that ``sharding`` cannot honour."""
    check_mode(sharding)
    check_clip_groups(clip_groups)
    if loss_scaling not in get_args(LossScaling):
        raise ValueError(f"loss_scaling must be one of {get_args(LossScaling)}, got {loss_scaling!r}")
    if not isinstance(options.bucket_bytes, int) or options.bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {options.bucket_bytes!r}")
    if sharding == "fsdp":
        return
    if num_tensor_ranks > 1:
        raise ValueError(
            f"tensor_size={num_tensor_ranks} needs sharding='fsdp', got {sharding!r}, which keeps plain weights"
        )
    for key in _OF_FSDP:
        if getattr(options, key) != getattr(ModeOptions, key):
            raise ValueError(
                f"{key}={getattr(options, key)!r} is about the weights that FSDP2 gathers; sharding={sharding!r} keeps "
                "whole weights on every rank, so remove it, or use sharding='fsdp'"
            )
