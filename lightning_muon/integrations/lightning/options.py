"""Which options of the strategy go together."""

from __future__ import annotations

from typing import get_args

from lightning_muon.integrations.lightning.gradient_rules import check_clip_groups
from lightning_muon.integrations.lightning.mesh import MeshSizes
from lightning_muon.integrations.lightning.running_strategy import LossScaling
from lightning_muon.sharding.modes.mode import ModeOptions
from lightning_muon.sharding.modes.registry import MODES, check_mode

# Options of the modes that users set, by their names in the strategy.
_SET_BY_USERS = ("wrap_policy", "reshard_after_forward", "reshard_after_backward", "early_all_gather", "bucket_bytes")


def check_decoupled_nodes(sharding: str, sizes: MeshSizes) -> None:
    """Raise ``ValueError`` if the replicas cannot be the nodes of a FlexDeMo."""
    takers = [name for name, mode in MODES.items() if "decoupled_nodes" in mode.takes]
    if sharding not in takers:
        raise ValueError(f"optimizer=FlexDeMoConfig(...) needs sharding={takers[0]!r}, got {sharding!r}")
    if sizes.num_tensor_ranks > 1:
        raise ValueError(
            f"optimizer=FlexDeMoConfig(...) does not go with tensor_size={sizes.num_tensor_ranks}: it exchanges the "
            "parts of weights that lie on one axis, shard; use tensor_size=1, or a MuonConfig"
        )
    if sizes.has_lightning_names:
        raise ValueError(
            f"optimizer=FlexDeMoConfig(...) needs the mesh axes replicate (nodes) and shard, which data_parallel_size="
            f"{sizes.data_parallel_size!r} replaces by Lightning's; give replicate_size and shard_size in its place"
        )


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
    mode = MODES[sharding]
    if num_tensor_ranks > 1 and not mode.divides_weights:
        others = [name for name, other in MODES.items() if other.divides_weights]
        raise ValueError(
            f"tensor_size={num_tensor_ranks} needs sharding={others[0]!r}, got {sharding!r}, which keeps plain weights"
        )
    for key in _SET_BY_USERS:
        value = getattr(options, key)
        if value != getattr(ModeOptions, key) and key not in mode.takes:
            takers = [name for name, other in MODES.items() if key in other.takes]
            raise ValueError(
                f"{key}={value!r} means nothing with sharding={sharding!r}; remove it, or use one of {takers}"
            )
