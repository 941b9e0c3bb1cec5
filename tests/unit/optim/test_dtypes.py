"""Which dtype "auto" means."""

from __future__ import annotations

import pytest
import torch

from lightning_muon.compat.torch import cpu_multiplies_bfloat16_fast
from lightning_muon.optim.dtypes import check_dtypes, resolve_compute_dtype, resolve_wire_dtype


def test_auto_is_bfloat16_just_where_the_cpu_has_instructions_for_it() -> None:
    expected = torch.bfloat16 if cpu_multiplies_bfloat16_fast() else torch.float32
    assert resolve_compute_dtype("auto", torch.device("cpu")) is expected
    assert resolve_compute_dtype("auto", torch.device("meta")) is torch.float32


def test_the_wire_follows_the_compute_dtype_unless_told() -> None:
    assert resolve_wire_dtype("auto", torch.float32) is torch.float32
    assert resolve_wire_dtype("bfloat16", torch.float32) is torch.bfloat16


def test_other_dtypes_are_refused_by_option() -> None:
    check_dtypes("auto", "float32")
    with pytest.raises(ValueError, match="wire_dtype must be 'auto', 'float32' or 'bfloat16', got 'fp8'"):
        check_dtypes("auto", "fp8")
