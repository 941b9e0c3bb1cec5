from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon import FlexDeMo, FlexDeMoConfig, MuonConfig, ParallelMuon
from lightning_muon.compat.lightning import LightningPackage
from lightning_muon.integrations.lightning.trainer import (
    has_default_optimizer,
    provide_default_optimizer,
    remove_default_optimizer,
)

pl = pytest.importorskip("lightning.pytorch")
_PACKAGE = LightningPackage("lightning.pytorch")


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.last = nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 5)


class _WithOptimizer(_Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def test_a_module_without_optimizer_gets_one_and_loses_it_again() -> None:
    module = _Module()
    provide_default_optimizer(module, MuonConfig(lr=0.25), _PACKAGE)
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, ParallelMuon)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert has_default_optimizer(module)
    remove_default_optimizer(module)
    assert "configure_optimizers" not in vars(module) and not has_default_optimizer(module)


def test_the_optimizer_of_the_user_is_not_replaced_by_the_default() -> None:
    module = _WithOptimizer()
    provide_default_optimizer(module, MuonConfig(), _PACKAGE)
    assert isinstance(module.configure_optimizers(), torch.optim.AdamW)
    remove_default_optimizer(module)


def test_the_config_decides_what_a_module_without_optimizer_gets() -> None:
    module = _Module()
    provide_default_optimizer(module, FlexDeMoConfig(lr=0.25, base="muon"), _PACKAGE)
    optimizer = module.configure_optimizers()
    assert isinstance(optimizer, FlexDeMo) and optimizer.config.lr == 0.25
    remove_default_optimizer(module)
