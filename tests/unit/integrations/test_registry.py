"""Registration with each package, in any order of imports, without importing one."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lightning_muon
from lightning_muon.integrations import fabric, lightning, registry

# Our package first; theirs first; and our class first, which imports theirs, which registers our class.
_TRAINERS = {
    "lightning.pytorch": "import lightning_muon; import lightning.pytorch",
    "pytorch_lightning": "from lightning_muon.integrations.lightning.pytorch_lightning import ParallelMuonStrategy",
}
_FABRICS = {
    "lightning_fabric": "import lightning_fabric; import lightning_muon",
    "lightning.fabric": "from lightning_muon.integrations.fabric import ParallelMuonFabricStrategy",
}


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90).stdout


@pytest.mark.parametrize("package", _TRAINERS)
def test_both_names_are_registered_with_each_trainer(package: str) -> None:
    pytest.importorskip(package)
    code = f"""
{_TRAINERS[package]}
from {package}.strategies import StrategyRegistry, ModelParallelStrategy
from lightning_muon.integrations.registry import trainer_strategy
for name in ("parallel_muon", "flexdemo"):
    strategy = StrategyRegistry.get(name)
    is_right = isinstance(strategy, ModelParallelStrategy) and type(strategy) is trainer_strategy({package!r})
    print(is_right, strategy.package.name, StrategyRegistry[name]["description"] != "", strategy.options.has_nodes)
"""
    assert _run(code).splitlines() == [f"True {package} True {has_nodes}" for has_nodes in (False, True)]


@pytest.mark.parametrize("package", _FABRICS)
def test_both_names_are_registered_with_each_fabric(package: str) -> None:
    pytest.importorskip(package)
    code = f"""
{_FABRICS[package]}
from {package} import Fabric
from {package}.strategies import ModelParallelStrategy
from lightning_muon.integrations.registry import fabric_strategy
for name in ("parallel_muon", "flexdemo"):
    strategy = Fabric(accelerator="cpu", devices=2, strategy=name).strategy
    is_right = isinstance(strategy, ModelParallelStrategy) and type(strategy) is fabric_strategy({package!r})
    print(is_right, type(strategy).__name__, strategy.options.has_nodes)
"""
    assert _run(code).splitlines() == [f"True ParallelMuonFabricStrategy {has_nodes}" for has_nodes in (False, True)]


def test_the_first_packages_give_the_public_classes() -> None:
    pytest.importorskip("lightning.pytorch")
    assert lightning_muon.ParallelMuonStrategy is registry.trainer_strategy("lightning.pytorch")
    assert lightning.ParallelMuonStrategy is lightning_muon.ParallelMuonStrategy
    assert lightning_muon.ParallelMuonFabricStrategy is registry.fabric_strategy("lightning.fabric")
    assert fabric.ParallelMuonFabricStrategy is lightning_muon.ParallelMuonFabricStrategy
    for room in (lightning, fabric):
        with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
            _ = room.Nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy_class", [registry.trainer_strategy, registry.fabric_strategy])
def test_a_missing_lightning_is_explained(monkeypatch: pytest.MonkeyPatch, strategy_class: type) -> None:
    monkeypatch.setattr(registry, "_is_installed", lambda package: False)
    with pytest.raises(ImportError, match=r"pip install 'lightning-muon\[lightning\]'"):
        strategy_class()


@pytest.mark.parametrize(
    ("strategy_class", "package"),
    [(registry.trainer_strategy, "pytorch_lightning"), (registry.fabric_strategy, "lightning_fabric")],
)
def test_the_other_package_is_taken_if_it_is_alone(
    monkeypatch: pytest.MonkeyPatch, strategy_class: type, package: str
) -> None:
    pytest.importorskip(package)
    monkeypatch.setattr(registry, "_is_installed", lambda name: name == package)
    assert strategy_class().package.name == "pytorch_lightning"


def test_a_package_whose_parent_is_missing_is_not_installed() -> None:
    assert not registry._is_installed("no_such_parent.child")
    assert registry._is_installed("torch.nn")
