"""Precision plugins; what they compute is in tests/integration/test_precision.py."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.integrations.lightning.trainer import EnginePlugin, sharded_plugin
from tests.integration.training import PACKAGES


def _plugin(name: Any, kind: str, *args: Any) -> Any:
    pytest.importorskip(name)
    package = LightningPackage(name)
    return sharded_plugin(getattr(package.module("plugins.precision"), kind)(*args), package)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(
    "args", [("Precision",), ("HalfPrecision", "bf16-true"), ("MixedPrecision", "bf16-mixed", "cpu")]
)
def test_a_supported_plugin_learns_to_clip_shards(name: str, args: Any) -> None:
    plugin = _plugin(name, *args)
    original = getattr(LightningPackage(name).module("plugins.precision"), args[0])  # type: ignore[arg-type]
    assert isinstance(plugin, original)
    assert type(plugin).clip_grad_by_norm is EnginePlugin.clip_grad_by_norm
    assert type(plugin).clip_grad_by_value is EnginePlugin.clip_grad_by_value
    assert sharded_plugin(plugin, LightningPackage(name)) is plugin  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (("MixedPrecision", "16-mixed", "cpu"), "16-mixed.*float16 needs loss scaling.*'bf16-mixed'"),
        (("HalfPrecision", "16-true"), "16-true"),
        (("DoublePrecision",), "DoublePrecision"),
        (("FSDPPrecision", "bf16-mixed"), "FSDPPrecision"),
    ],
)
def test_any_other_plugin_is_an_error(args: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _plugin(PACKAGES[0], *args)
