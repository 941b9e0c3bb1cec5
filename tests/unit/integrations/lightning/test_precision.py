"""Precision plugins and policies; what they compute is in tests/integration/test_precision.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.integrations.lightning.precision import RuledGradients, mixed_precision_policy, sharded_plugin
from tests.integration.training import PACKAGES


def _plugin(name: Any, kind: str, *args: Any) -> Any:
    pytest.importorskip(name)
    package = LightningPackage(name)
    return sharded_plugin(getattr(package.module("plugins.precision"), kind)(*args), package)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(
    "args", [("Precision",), ("HalfPrecision", "bf16-true"), ("MixedPrecision", "bf16-mixed", "cpu")]
)
def test_a_supported_plugin_keeps_its_class_and_learns_to_clip_shards(name: str, args: Any) -> None:
    plugin = _plugin(name, *args)
    original = getattr(LightningPackage(name).module("plugins.precision"), args[0])  # type: ignore[arg-type]
    assert isinstance(plugin, original)
    assert type(plugin).clip_grad_by_norm is RuledGradients.clip_grad_by_norm
    assert type(plugin).clip_grad_by_value is RuledGradients.clip_grad_by_value
    assert sharded_plugin(plugin, LightningPackage(name)) is plugin  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (("MixedPrecision", "16-mixed", "cpu"), "16-mixed.*use precision='bf16-mixed'"),
        (("HalfPrecision", "16-true"), "16-true.*use precision='bf16-mixed'"),
        (("DoublePrecision",), "got DoublePrecision"),
        (("FSDPPrecision", "bf16-mixed"), "got FSDPPrecision"),
    ],
)
def test_any_other_plugin_is_an_error(args: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _plugin(PACKAGES[0], *args)


def test_mixed_precision_gathers_bfloat16_and_reduces_float32() -> None:
    plugin = _plugin(PACKAGES[0], "MixedPrecision", "bf16-mixed", "cpu")
    policy = mixed_precision_policy(plugin, nn.Linear(2, 2))
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )


def test_batch_norms_are_gathered_in_float32() -> None:
    plugin = _plugin(PACKAGES[0], "MixedPrecision", "bf16-mixed", "cpu")
    assert mixed_precision_policy(plugin, nn.Sequential(nn.BatchNorm2d(3))).param_dtype is None


def test_children_that_are_roots_do_not_cast_their_outputs() -> None:
    module = nn.Linear(2, 2)
    module.automatic_optimization = False  # type: ignore[assignment]
    plugin = _plugin(PACKAGES[0], "MixedPrecision", "bf16-mixed", "cpu")
    assert mixed_precision_policy(plugin, module).output_dtype is None


@pytest.mark.parametrize("args", [("Precision",), ("HalfPrecision", "bf16-true")])
def test_true_precisions_cast_nothing(args: Any) -> None:
    policy = mixed_precision_policy(_plugin(PACKAGES[0], *args), nn.Linear(2, 2))
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, None, None)
