"""Policies of FSDP2; what they compute is in tests/integration/test_precision.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_muon.engine.model_setup import mixed_precision_policy


def test_mixed_precision_gathers_bfloat16_and_reduces_float32() -> None:
    policy = mixed_precision_policy("bf16-mixed", nn.Linear(2, 2))
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )


def test_batch_norms_are_gathered_in_float32() -> None:
    assert mixed_precision_policy("bf16-mixed", nn.Sequential(nn.BatchNorm2d(3))).param_dtype is None


def test_children_that_are_roots_do_not_cast_their_outputs() -> None:
    module = nn.Linear(2, 2)
    module.automatic_optimization = False  # type: ignore[assignment]
    assert mixed_precision_policy("bf16-mixed", module).output_dtype is None


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_true_precisions_cast_nothing(precision: str) -> None:
    policy = mixed_precision_policy(precision, nn.Linear(2, 2))
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, None, None)
