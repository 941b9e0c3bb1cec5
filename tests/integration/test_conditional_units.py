"""Ranks that use different parts of a model: exact, or an error with the name on all ranks, never a hang."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_muon import MuonConfig
from tests.integration.training import (
    PACKAGES,
    VOCABULARY,
    WIDTH,
    Block,
    full_weights,
    language_model,
    load,
    loader,
    loss_of,
    max_difference,
    strategy_class,
    trainer,
)
from tests.support.processes import ProcessPool


class Experts(nn.Module):
    """Each rank uses the expert that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, expert: int | None) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x if expert is None else self.experts[expert](x))


def _fit(package: str, sharding: str, used: Sequence[int | None], *, num_ranks: int, **options: Any) -> dict[str, Any]:
    """``used``: the expert of each rank; one process computes for all of them."""
    pl = load(package)
    model = language_model(pl, network=Experts)
    shares = num_ranks // dist.get_world_size()

    def training_step(self: Any, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        losses = []
        for share in range(shares):
            rank = dist.get_rank() * shares + share
            mine = [part[share::shares] for part in batch]
            losses.append(loss_of(self.network(mine[0], used[rank]), mine[1]))
        return torch.stack(losses).mean()

    type(model).training_step = training_step
    del type(model).on_train_batch_end
    config = MuonConfig(compute_dtype="float32", wire_dtype="float32")
    strategy = strategy_class(package)(sharding=sharding, optimizer=config, **options)
    trainer(pl, strategy=strategy, max_epochs=1).fit(model, loader())
    return full_weights(model)


@pytest.mark.parametrize(("sharding", "options"), [("zero2", {}), ("ddp", {}), ("fsdp", {"wrap_policy": ()})], ids=str)
@pytest.mark.parametrize("used", [(0, 1), (None, 1), (0, None), (1, 1)], ids=str)
def test_what_only_some_ranks_use_is_exact(
    gloo: ProcessPool, sharding: str, options: dict[str, Any], used: Sequence[int | None]
) -> None:
    expected = gloo.run(_fit, PACKAGES[0], "none", used, num_ranks=2, world_size=1)[0]
    weights = gloo.run(_fit, PACKAGES[0], sharding, used, num_ranks=2, world_size=2, **options)[0]
    assert max_difference(weights, expected) < 1e-5


@pytest.mark.parametrize("used", [(0, 1), (0, None)], ids=str)
def test_units_that_only_some_ranks_run_fail_soon_on_all_of_them(gloo: ProcessPool, used: Sequence[int | None]) -> None:
    gloo.run(_fit, PACKAGES[0], "fsdp", (1, 1), num_ranks=2, world_size=2)  # Processes that have started.
    start = time.monotonic()
    gloo.expect_error_on_all_ranks(
        _fit, PACKAGES[0], "fsdp", used, num_ranks=2, world_size=2,
        exception=RuntimeError, match=r"network\.experts\.[01].*wrap_policy",
    )  # fmt: skip
    assert time.monotonic() - start < 15
