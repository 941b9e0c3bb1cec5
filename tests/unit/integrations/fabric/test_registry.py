"""Registration in each package of Fabric, in any order of imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_muon.integrations.fabric import registry


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90).stdout


# Fabric first; and the class first, which imports Fabric, which registers the class.
_PROGRAMS = {
    "lightning_fabric": "import lightning_fabric; import lightning_muon",
    "lightning.fabric": "from lightning_muon.integrations.fabric import ParallelMuonFabricStrategy",
}


@pytest.mark.parametrize("package", _PROGRAMS)
def test_the_names_work_in_any_order_of_imports(package: str) -> None:
    pytest.importorskip(package)
    code = f"""
{_PROGRAMS[package]}
from {package} import Fabric
from {package}.strategies import ModelParallelStrategy
from lightning_muon.integrations.fabric.registry import strategy_class
for name in ("parallel_muon", "flexdemo"):
    strategy = Fabric(accelerator="cpu", devices=2, strategy=name).strategy
    is_right = isinstance(strategy, ModelParallelStrategy) and type(strategy) is strategy_class({package!r})
    print(is_right, type(strategy).__name__, strategy.options.has_nodes)
"""
    assert _run(code).splitlines() == [f"True ParallelMuonFabricStrategy {has_nodes}" for has_nodes in (False, True)]


def test_each_package_has_one_class() -> None:
    for package in registry.PACKAGES:
        pytest.importorskip(package)
        found = registry.strategy_class(package)
        assert found is registry.strategy_class(package)
        assert found.package is registry.PACKAGES[package]
        assert found.__mro__[-1] is object and found.__doc__


def test_a_missing_fabric_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_is_installed", lambda package: False)
    with pytest.raises(ImportError, match=r"pip install 'lightning-muon\[lightning\]'"):
        registry.default_strategy_class()


def test_the_other_package_is_taken_if_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning_fabric")
    monkeypatch.setattr(registry, "_is_installed", lambda package: package == "lightning_fabric")
    assert registry.default_strategy_class() is registry.strategy_class("lightning_fabric")
