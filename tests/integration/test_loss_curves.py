"""The same curve at any number of ranks, and as in a plain loop with torch.optim.Muon and AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon import MuonConfig
from tests.integration.training import (
    PACKAGES,
    Network,
    adamw,
    full_weights,
    language_model,
    load,
    loader,
    loss_of,
    max_difference,
    plain_loader,
    strategy_class,
    trainer,
)
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool

# Float32 sums in another order (reduce-scatter, shards of the norm), through 6 steps of Newton-Schulz.
TOLERANCE = 5e-5


def _fit(package: str, sizes: dict[str, Any] | None = None, **kwargs: Any) -> tuple[list[float], dict[str, Any], float]:
    pl = load(package)
    model = language_model(pl, network=lambda: Network(tied=kwargs.pop("tied", False)))
    # In bfloat16 the order of sums shows in the third digit.
    strategy = strategy_class(package)(**(sizes or {}), optimizer=MuonConfig(compute_dtype="float32"))
    fitter = trainer(pl, strategy=strategy, **kwargs)
    fitter.fit(model, loader())
    weights = full_weights(model)
    val = fitter.validate(model, loader(), verbose=False)[0]["val"]
    return model.losses, weights, val


def _muon(network: nn.Module) -> MuonAndAdamW:
    matrices = [name for name, _ in network.named_parameters() if ".up.weight" in name or ".down.weight" in name]
    return MuonAndAdamW(network, matrices, lr=1e-2, weight_decay=0.05, betas=(0.8, 0.9))


def _plain_loop(
    make_optimizer: Callable[[nn.Module], Any] = _muon, *, accumulate: int = 1, **clip: float
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loop that a user would write."""
    torch.manual_seed(0)
    network = Network()
    optimizer, losses = make_optimizer(network), []
    for epoch in range(2):
        for index, (tokens, targets) in enumerate(plain_loader(epoch)):
            loss = loss_of(network(tokens), targets)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if (index + 1) % accumulate == 0:
                if "norm" in clip:
                    nn.utils.clip_grad_norm_(network.parameters(), clip["norm"])
                if "value" in clip:
                    nn.utils.clip_grad_value_(network.parameters(), clip["value"])
                optimizer.step()
                network.zero_grad()
    return losses, {f"network.{name}": value for name, value in network.state_dict().items()}


def test_every_mesh_follows_the_plain_loop(gloo: ProcessPool) -> None:
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
    plain_losses, plain_weights = _plain_loop(accumulate=3, norm=0.3)
    losses, weights, score = gloo.run(_fit, PACKAGES[0], world_size=1, **options)[0]
    assert losses == pytest.approx(plain_losses, abs=TOLERANCE)
    assert max_difference(weights, plain_weights) < TOLERANCE
    for sizes in ({"shard_size": 1}, {"replicate_size": 2}, {"data_parallel_size": 4}):
        losses, weights, val = gloo.run(_fit, PACKAGES[0], sizes, world_size=4, **options)[0]
        assert losses == pytest.approx(plain_losses, abs=TOLERANCE), sizes
        assert max_difference(weights, plain_weights) < TOLERANCE, sizes
        assert val == pytest.approx(score, abs=TOLERANCE), sizes


def test_clipping_by_value_follows_the_plain_loop(gloo: ProcessPool) -> None:
    options = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
    losses, weights, _ = gloo.run(_fit, PACKAGES[0], {"replicate_size": 2}, world_size=4, **options)[0]
    plain_losses, plain_weights = _plain_loop(value=0.002)
    assert losses == pytest.approx(plain_losses, abs=TOLERANCE)
    assert max_difference(weights, plain_weights) < TOLERANCE


def test_the_clipping_of_these_tests_changes_the_result() -> None:
    unclipped = _plain_loop()[1]
    assert max_difference(_plain_loop(norm=0.3)[1], unclipped) > 100 * TOLERANCE
    assert max_difference(_plain_loop(value=0.002)[1], unclipped) > 100 * TOLERANCE


def test_tied_weights_stay_tied_and_follow_the_single_rank(gloo: ProcessPool) -> None:
    losses, weights, _ = gloo.run(_fit, PACKAGES[0], {"replicate_size": 2}, world_size=4, tied=True)[0]
    single = gloo.run(_fit, PACKAGES[0], world_size=1, tied=True)[0]
    assert torch.equal(weights["network.embedding.weight"], weights["network.head.weight"])
    assert losses == pytest.approx(single[0], abs=TOLERANCE)
    assert max_difference(weights, single[1]) < TOLERANCE


def _kept(package: str) -> tuple[list[float], dict[str, Any]]:
    pl = load(package)
    model = language_model(pl, configure=adamw)
    trainer(pl, strategy=strategy_class(package)(optimizer="keep")).fit(model, loader())
    return model.losses, full_weights(model)


def test_a_kept_adamw_follows_adamw(gloo: ProcessPool) -> None:
    losses, weights = gloo.run(_kept, PACKAGES[0], world_size=2)[0]
    expected_losses, expected_weights = _plain_loop(adamw)
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert max_difference(weights, expected_weights) < 1e-5
