"""Strategies: registered with each package, in any order of imports, without importing one; where their ranks meet."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_muon import ParallelMuonStrategy
from lightning_muon.integrations import registry
from lightning_muon.integrations.strategy import store_of_attempt
from tests.integration.training import PACKAGES


def test_both_names_are_registered_with_each_package() -> None:
    for package in PACKAGES:
        pytest.importorskip(package)
    # Theirs first, then ours; our class first, twice, which imports theirs, which registers it; and ours, then theirs.
    code = """
import lightning_fabric, lightning_muon, sys
from lightning_muon.integrations.fabric import ParallelMuonFabricStrategy
from lightning_muon.integrations.lightning.pytorch_lightning import ParallelMuonStrategy
import lightning.pytorch
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


@pytest.mark.parametrize(("given", "asked"), [(None, "1"), ("0", "0")])
def test_what_nccl_sends_goes_before_products(monkeypatch: pytest.MonkeyPatch, given: str | None, asked: str) -> None:
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", given or "")
    if given is None:
        monkeypatch.delenv("TORCH_NCCL_HIGH_PRIORITY")
    ParallelMuonStrategy()
    assert os.environ["TORCH_NCCL_HIGH_PRIORITY"] == asked


def test_an_attempt_meets_in_a_store_without_old_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            stores = list(threads.map(lambda rank: store_of_attempt(rank, 3, timedelta(seconds=20)), (2, 0, 1)))
            assert not any(store.check(["address"]) for store in stores)
            stores[0].set("address", "rank 2")
            assert [store.get("address") for store in stores] == [b"rank 2"] * 3
    with pytest.raises(TimeoutError, match="rank 0 has not come"):
        store_of_attempt(1, 3, timedelta(seconds=0.3))
