"""Losses that are sums over tokens, of which every rank and micro-batch has another number."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.integration.integrations.fabric.loop import (
    HYPER,
    MATRICES,
    adamw,
    launch,
    micro_batch,
    network,
    own_rows,
    summed_loss,
    weights,
)
from tests.integration.training import max_difference
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool


def _masked(step: int, index: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks; row r keeps r % 4 + index targets."""
    tokens, targets = micro_batch(step, index)
    for row, labels in enumerate(targets):
        labels[row % 4 + index :] = -100
    return tokens, targets


def _train(sharding: str, *, silent: bool = False) -> dict[str, Tensor]:
    fabric = launch(sharding=sharding, loss_scaling="tokens")
    model: Any = network()
    model, optimizer = fabric.setup(model, adamw(model))
    for step in range(3):
        for index in range(2):
            tokens, targets = own_rows(fabric, _masked(step, index))
            with fabric.no_backward_sync(model, enabled=index == 0):
                loss = summed_loss(model(tokens), targets)
                if not (silent and fabric.global_rank == 1 and index == 0):
                    fabric.strategy.report_tokens((targets != -100).sum())
                fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    result = weights(model)
    fabric.strategy.teardown()
    return result


def test_gradients_are_the_mean_over_all_tokens(gloo: ProcessPool) -> None:
    module = network()
    optimizer = MuonAndAdamW(module, MATRICES, **HYPER)
    for step in range(3):
        module.zero_grad()
        batches = [_masked(step, index) for index in range(2)]
        num_tokens = sum(int((targets != -100).sum()) for _, targets in batches)
        for tokens, targets in batches:
            (summed_loss(module(tokens), targets) / num_tokens).backward()
        optimizer.step()
    expected = dict(module.state_dict())
    for sharding in ("fsdp", "zero2"):
        assert max_difference(gloo.run(_train, sharding, world_size=2)[0], expected) <= 1e-6


def test_a_rank_that_reports_no_tokens_is_an_error_on_all_ranks(gloo: ProcessPool) -> None:
    failures = gloo.expect_error_on_all_ranks(
        _train, "fsdp", silent=True, match="rank 1 reported no tokens in micro-batch 1 of 2", world_size=2
    )
    assert "fabric.strategy.report_tokens(n)" in failures[0].traceback
