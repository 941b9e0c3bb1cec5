"""The same curve at any number of ranks, and as in a plain loop with torch.optim.Muon and AdamW."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from tests.integration import training
from tests.reference.muon_and_adamw import MuonAndAdamW
from tests.support.processes import ProcessPool

# Float32 sums in another order (reduce-scatter, shards of the norm), through 6 steps of Newton-Schulz.
TOLERANCE = 5e-5


def _fit(
    sizes: dict[str, Any], *, tied: bool = False, **kwargs: Any
) -> tuple[list[float], dict[str, torch.Tensor], float]:
    pl = training.load()
    model = training.language_model(pl, network=lambda: training.Network(tied=tied))
    fitter = training.trainer(pl, strategy=training.strategy_class()(optimizer=training.EXACT, **sizes), **kwargs)
    fitter.fit(model, training.loader())
    return (
        model.losses,
        training.full_weights(model),
        fitter.validate(model, training.loader(), verbose=False)[0]["val"],
    )


def _muon(network: nn.Module) -> MuonAndAdamW:
    matrices = [name for name, _ in network.named_parameters() if ".up.weight" in name or ".down.weight" in name]
    factor = MEASURED_MUON_LR_FACTOR
    return MuonAndAdamW(network, matrices, lr=1e-2, muon_lr_factor=factor, weight_decay=0.05, betas=(0.8, 0.9))


def _plain_loop(
    make_optimizer: Callable[[nn.Module], Any] = _muon,
    *,
    tied: bool = False,
    accumulate_grad_batches: int = 1,
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str = "norm",
) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """The loop that a user would write, with the names of a Trainer; losses, weights, mean loss of the last weights."""
    torch.manual_seed(0)
    network = training.Network(tied=tied)
    optimizer, losses = make_optimizer(network), []
    for epoch in range(2):
        batches = list(training.plain_loader(epoch))
        for index, (tokens, targets) in enumerate(batches, start=1):
            loss = training.loss_of(network(tokens), targets)
            (loss / accumulate_grad_batches).backward()
            losses.append(loss.item())
            if index % accumulate_grad_batches == 0 or index == len(batches):
                if gradient_clip_val is not None:
                    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}
                    clip[gradient_clip_algorithm](network.parameters(), gradient_clip_val)
                optimizer.step()
                network.zero_grad()
    with torch.no_grad():
        score = torch.stack(
            [training.loss_of(network(tokens), targets) for tokens, targets in training.plain_loader(0)]
        ).mean()
    return losses, {f"network.{name}": value for name, value in network.state_dict().items()}, float(score)


_NORM, _VALUE = {"gradient_clip_val": 0.3}, {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("world_size", "sizes", "options"),
    [
        (1, {}, _NORM | {"accumulate_grad_batches": 3}),
        (2, {"shard_size": 1}, _NORM | {"accumulate_grad_batches": 3}),
        (4, {"data_parallel_size": 4}, _NORM | {"accumulate_grad_batches": 3}),
        (4, {"replicate_size": 2}, _NORM | {"tied": True}),
        (2, {"reshard_after_backward": False}, _VALUE | {"accumulate_grad_batches": 2}),
        (4, {"sharding": "zero2", "replicate_size": 2}, _NORM | {"tied": True}),
        (2, {"sharding": "zero2"}, _VALUE),
        (2, {"sharding": "ddp"}, _NORM | {"accumulate_grad_batches": 4}),
    ],
    ids=str,
)
def test_every_sharding_follows_the_plain_loop(
    gloo: ProcessPool, world_size: int, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    expected_losses, expected_weights, expected_score = _plain_loop(**options)
    if "gradient_clip_val" in options:
        unclipped = _plain_loop(**options | {"gradient_clip_val": None})[1]
        assert training.max_difference(expected_weights, unclipped) > 5 * TOLERANCE, "this clipping changes something"
    losses, weights, score = gloo.run(_fit, sizes, world_size=world_size, **options)[0]
    assert losses == pytest.approx(expected_losses, abs=TOLERANCE)
    assert training.max_difference(weights, expected_weights) < TOLERANCE
    assert score == pytest.approx(expected_score, abs=TOLERANCE)


def _kept() -> tuple[list[float], dict[str, Any]]:
    pl = training.load()
    model = training.language_model(pl, configure=training.adamw)
    training.trainer(pl, strategy=training.strategy_class()(optimizer="keep")).fit(model, training.loader())
    return model.losses, training.full_weights(model)


def test_a_kept_adamw_follows_adamw(gloo: ProcessPool) -> None:
    losses, weights = gloo.run(_kept, world_size=2)[0]
    expected_losses, expected_weights, _ = _plain_loop(training.adamw)
    assert losses == pytest.approx(expected_losses, abs=1e-5)
    assert training.max_difference(weights, expected_weights) < 1e-5
