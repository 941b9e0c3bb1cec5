"""Programs that write to weights themselves: between steps it is allowed, gathered weights would forget it."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_muon
from tests.integration.training import load, max_difference, strategy_class, trainer
from tests.support.processes import ProcessPool, RanksFailedError


def _fit(sharding: str, where: str, first_batch: int = 0) -> dict[str, Tensor]:
    """The weights of a frozen copy that follows a network, from ``first_batch`` on."""
    pl = load()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 7))

    class Follower(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.target = network, deepcopy(network).requires_grad_(False)
            self.embedding = nn.Embedding(5, 7, max_norm=0.5 if where == "embedding" else None)

        def follow(self, *_: Any) -> None:
            for own, other in zip(self.target.parameters(), self.network.parameters(), strict=True):
                own.data.lerp_(other.data, 0.5)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if where == "training_step" and index >= first_batch:
                self.follow()
            x = batch[0] + self.embedding(torch.arange(len(batch[0])))
            return F.mse_loss(self.network(x), self.target(batch[0] + 1))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    if where.startswith("on_"):
        setattr(Follower, where, Follower.follow)
    model = Follower()
    rows = torch.randn(24, 7, generator=torch.Generator().manual_seed(1))
    fitter = trainer(pl, strategy=strategy_class()(sharding=sharding), max_epochs=1)
    fitter.fit(model, DataLoader(TensorDataset(rows), batch_size=2))
    weights = lightning_muon.full_state_dict(model)
    return {name: value for name, value in weights.items() if name.startswith("target")}


@pytest.mark.parametrize(
    ("where", "first_batch", "named"),
    [
        ("training_step", 0, "4 gathered weights (target.0.weight"),
        ("training_step", 3, "4 gathered weights (target.0.weight"),
        ("on_before_zero_grad", 0, "4 gathered weights (target.0.weight"),
        ("embedding", 0, "1 gathered weights (embedding.weight"),
    ],
)
def test_what_would_be_forgotten_is_an_error(gloo: ProcessPool, where: str, first_batch: int, named: str) -> None:
    match = rf"written to {re.escape(named)}, .*Change weights between steps"
    if where != "embedding":
        gloo.expect_error_on_all_ranks(
            _fit, "fsdp", where, first_batch, world_size=2, exception=RuntimeError, match=match
        )
        return
    with pytest.raises(RanksFailedError, match=match) as raised:  # Each rank knows its rows alone.
        gloo.run_fresh(_fit, "fsdp", where, first_batch, world_size=2)
    assert 0 in raised.value.failures and raised.value.exit_codes in ({}, {1: 1})


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
def test_modes_keep_what_is_written(gloo: ProcessPool, where: str) -> None:
    shardings = ["zero2", "ddp", *["fsdp"] * (where == "on_train_batch_end")]
    first, *others = [gloo.run(_fit, sharding, where, world_size=2)[0] for sharding in shardings]
    for other in others:
        assert max_difference(first, other) < 1e-5
