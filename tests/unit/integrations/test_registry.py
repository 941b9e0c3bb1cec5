"""Strategy classes: registration with each package, in any order of imports, without importing one; their arguments."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

import lightning_muon
from lightning_muon import MuonConfig, Options
from lightning_muon.integrations import fabric, registry
from lightning_muon.integrations.registry import strategy_class
from tests.integration.training import PACKAGES

_ROOM = "lightning_muon.integrations"


# Theirs first, then ours; twice our class first, which imports theirs, which registers it; and ours first, then theirs.
_IMPORTS = f"""
import lightning_fabric, lightning_muon
from {_ROOM}.fabric import ParallelMuonFabricStrategy
from {_ROOM}.lightning.pytorch_lightning import ParallelMuonStrategy
import lightning.pytorch
"""


def test_both_names_are_registered_with_each_package() -> None:
    for package in PACKAGES:
        pytest.importorskip(package)
    code = f"""{_IMPORTS}
import sys
from lightning_muon.integrations.registry import strategy_class
for trainer, other in (("lightning.pytorch", "lightning_fabric"), ("pytorch_lightning", "lightning.fabric")):
    fabric, strategies = sys.modules[other], sys.modules[trainer + ".strategies"]
    for name in ("parallel_muon", "flexdemo"):
        strategy = strategies.StrategyRegistry.get(name)
        is_right = isinstance(strategy, strategies.ModelParallelStrategy) and type(strategy) is strategy_class(trainer)
        has_words = strategies.StrategyRegistry[name]["description"] != ""
        print(is_right, strategy.package.name, has_words, strategy.options.has_nodes)
        strategy = fabric.Fabric(accelerator="cpu", devices=2, strategy=name).strategy
        is_right = isinstance(strategy, fabric.strategies.ModelParallelStrategy)
        is_right &= type(strategy) is strategy_class(other)
        print(is_right, type(strategy).__name__, strategy.options.has_nodes)
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90).stdout.splitlines()
    assert found == [
        line
        for trainer in PACKAGES
        for has_nodes in (False, True)
        for line in (f"True {trainer} True {has_nodes}", f"True ParallelMuonFabricStrategy {has_nodes}")
    ]


def test_the_first_packages_give_the_public_classes() -> None:
    pytest.importorskip("lightning.pytorch")
    assert lightning_muon.ParallelMuonStrategy is registry.strategy_class("lightning.pytorch")
    assert lightning_muon.ParallelMuonFabricStrategy is registry.strategy_class("lightning.fabric")
    assert fabric.ParallelMuonFabricStrategy is lightning_muon.ParallelMuonFabricStrategy
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = fabric.Nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "second"),
    [("ParallelMuonStrategy", "pytorch_lightning"), ("ParallelMuonFabricStrategy", "lightning_fabric")],
)
def test_what_is_installed_is_taken(monkeypatch: pytest.MonkeyPatch, name: str, second: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(ImportError, match=r'pip install "lightning-muon\[lightning\]"'):
        getattr(registry, name)

    def without_lightning(name: str, package: str | None = None) -> Any:
        return None if name == "lightning" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_lightning)
    pytest.importorskip(second)
    assert getattr(registry, name).package.name == "pytorch_lightning"


@pytest.fixture(params=PACKAGES)
def cls(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param)
    return strategy_class(request.param)


def test_arguments_are_options(cls: Any) -> None:
    assert inspect.signature(cls).parameters.keys() == {field.name for field in fields(Options)}
    given: Any = {"shard_size": 2, "optimizer": MuonConfig(lr=0.5), "save_distributed_checkpoint": False}
    assert cls(**given).options == Options(**given)
