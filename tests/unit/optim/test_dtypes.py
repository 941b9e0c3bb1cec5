"""Which dtype "auto" means."""

from __future__ import annotations

import torch

from lightning_muon.compat.torch import cpu_multiplies_bfloat16_fast
from lightning_muon.optim.dtypes import resolve_compute_dtype, resolve_wire_dtype


def test_auto_is_bfloat16_just_where_the_cpu_has_instructions_for_it() -> None:
    expected = torch.bfloat16 if cpu_multiplies_bfloat16_fast() else torch.float32
    assert resolve_compute_dtype("auto", torch.device("cpu")) is expected
    assert resolve_compute_dtype("auto", torch.device("meta")) is torch.float32


def test_the_wire_follows_the_compute_dtype_unless_told() -> None:
    assert resolve_wire_dtype("auto", torch.float32) is torch.float32
    assert resolve_wire_dtype("bfloat16", torch.float32) is torch.bfloat16
