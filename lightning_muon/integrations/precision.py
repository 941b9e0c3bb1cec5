"""Precision: which settings are possible, and the policy of FSDP2 for each."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

SUPPORTED = ("32-true", "bf16-true", "bf16-mixed")
# These update running statistics, which stay float32, and take no weights of another dtype.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def mixed_precision_policy(precision: str, module: nn.Module) -> MixedPrecisionPolicy:
    """What FSDP2 gathers and reduces in.

    With ``bf16-mixed`` the weights travel and compute in bfloat16, gradients are reduced in float32 and the output of
    the root is float32; the framework's autocast stays on, so that losses are computed in float32. A model with batch
    norms gathers float32 weights and leaves bfloat16 to autocast.

    Args:
        precision: One of :data:`SUPPORTED`.
        module: The whole module.
    """
    if precision != "bf16-mixed":
        return MixedPrecisionPolicy()
    has_batch_norm = any(isinstance(child, _BATCH_NORMS) for child in module.modules())
    return MixedPrecisionPolicy(
        param_dtype=None if has_batch_norm else torch.bfloat16,
        reduce_dtype=torch.float32,
        # Children that are roots of their own (manual optimization) hand bfloat16 to each other.
        output_dtype=torch.float32 if getattr(module, "automatic_optimization", True) else None,
    )
