"""Registration in each package, without importing it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_muon.integrations.lightning import registry


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(
    ("package", "imports"),
    [
        ("lightning.pytorch", "import lightning_muon; import lightning.pytorch"),
        ("pytorch_lightning", "import pytorch_lightning; import lightning_muon"),
        # The class, which imports Lightning, which registers the class.
        ("lightning.pytorch", "import lightning_muon.integrations.lightning.lightning_pytorch"),
    ],
)
def test_any_order_of_imports_registers_both_names(package: str, imports: str) -> None:
    pytest.importorskip(package)
    code = (
        f"{imports}; from {package}.strategies import StrategyRegistry as R, ModelParallelStrategy as M\n"
        "for name in ('parallel_muon', 'flexdemo'):\n"
        "    s = R.get(name)\n"
        "    print(isinstance(s, M), s.package.name, R[name]['description'] != '', s.options.has_nodes)"
    )
    assert _run(code).splitlines() == [f"True {package} True {has_nodes}" for has_nodes in (False, True)]


def test_a_missing_lightning_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_is_installed", lambda package: False)
    with pytest.raises(ImportError, match=r"pip install 'lightning-muon\[lightning\]'"):
        registry.default_strategy_class()


def test_the_other_package_is_taken_if_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytorch_lightning")
    monkeypatch.setattr(registry, "_is_installed", lambda package: package == "pytorch_lightning")
    assert registry.default_strategy_class().package.name == "pytorch_lightning"


def test_a_package_whose_parent_is_missing_is_not_installed() -> None:
    assert not registry._is_installed("no_such_parent.child")
    assert registry._is_installed("torch.nn")
