"""Resolve ``compute_dtype`` and ``wire_dtype``."""

from __future__ import annotations

import torch

from lightning_muon.compat.torch import cpu_multiplies_bfloat16_fast
from lightning_muon.config import DtypeName

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_compute_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """Dtype of Newton-Schulz; ``"auto"`` is bfloat16 where ``device`` multiplies it faster than float32."""
    if name != "auto":
        return _DTYPES[name]
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_fast = device.type == "cpu" and cpu_multiplies_bfloat16_fast()
    return torch.bfloat16 if is_fast else torch.float32


def resolve_wire_dtype(name: DtypeName, compute_dtype: torch.dtype) -> torch.dtype:
    """Dtype of what travels; ``"auto"`` is the compute dtype, which loses nothing that Newton-Schulz would keep."""
    return compute_dtype if name == "auto" else _DTYPES[name]
