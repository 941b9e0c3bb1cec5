"""The same curve at any number of ranks, and as in a plain loop with torch.optim.Muon and AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.integration.training import (
    PACKAGES,
    Network,
    adamw,
    dataset,
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

# Float32 sums in another order (reduce-scatter, shards of the norm), through 6 steps of Newton-Schulz.
TOLERANCE = 5e-5


def _fit(package: str, sizes: dict[str, Any] | None = None, **kwargs: Any) -> tuple[list[float], dict[str, Any], float]:
    pl = load(package)
    model = language_model(pl, network=lambda: Network(tied=kwargs.pop("tied", False)))
    strategy = strategy_class(package)(**sizes) if sizes else "parallel_muon"
    fitter = trainer(pl, strategy=strategy, **kwargs)
    fitter.fit(model, loader())
    weights = full_weights(model)
    val = fitter.validate(model, loader(), verbose=False)[0]["val"]
    return model.losses, weights, val


def _plain_loop(*, accumulate: int = 1, clip: float | None = None, clip_value: float | None = None, epochs: int = 2) -> Any:
    """The loop that a user would write, on whole matrices."""
    torch.manual_seed(0)
    network = Network()
    matrices = [p for name, p in network.named_parameters() if ".up.weight" in name or ".down.weight" in name]
    rest = [p for p in network.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.05, betas=(0.8, 0.9)),
    ]
    losses = []
    for _ in range(epochs):
        for index, (tokens, targets) in enumerate(DataLoader(dataset(), batch_size=8)):
            loss = loss_of(network(tokens), targets)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if (index + 1) % accumulate == 0:
                _step(network, optimizers, clip, clip_value)
    return losses, {f"network.{name}": value for name, value in network.state_dict().items()}


def _step(network: nn.Module, optimizers: list[Any], clip: float | None, clip_value: float | None) -> None:
    if clip is not None:
        nn.utils.clip_grad_norm_(network.parameters(), clip)
    if clip_value is not None:
        nn.utils.clip_grad_value_(network.parameters(), clip_value)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(autouse=True)
def _float32_newton_schulz(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon computes in bfloat16; the plain loop is to compute in float32 as ParallelMuon does here."""
    import torch.optim._muon as muon

    original = muon._zeropower_via_newtonschulz
    source = original.__globals__

    def in_float32(grad: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
        a, b, c = coefficients
        x = grad.T if grad.size(0) > grad.size(1) else grad
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if grad.size(0) > grad.size(1) else x

    monkeypatch.setitem(source, "_zeropower_via_newtonschulz", in_float32)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("world_size", "sizes"), [(1, None), (4, {"replicate_size": 2})])
def test_a_trainer_follows_the_plain_loop(gloo: ProcessPool, package: str, world_size: int, sizes: Any) -> None:
    losses, weights, _ = gloo.run(_fit, package, sizes, world_size=world_size)[0]
    plain_losses, plain_weights = _plain_loop()
    assert losses == pytest.approx(plain_losses, abs=TOLERANCE)
    assert max_difference(weights, plain_weights) < TOLERANCE


@pytest.mark.parametrize("sizes", [{"shard_size": 4}, {"shard_size": 1}, {"replicate_size": 2}, {"data_parallel_size": 4}])
def test_every_mesh_follows_the_plain_loop_with_accumulation_and_clipping(gloo: ProcessPool, sizes: Any) -> None:
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
    losses, weights, val = gloo.run(_fit, PACKAGES[0], sizes, world_size=4, **options)[0]
    single = gloo.run(_fit, PACKAGES[0], world_size=1, **options)[0]
    plain_losses, plain_weights = _plain_loop(accumulate=3, clip=0.3)
    assert losses == pytest.approx(plain_losses, abs=TOLERANCE)
    assert max_difference(weights, plain_weights) < TOLERANCE
    assert losses == pytest.approx(single[0], abs=TOLERANCE)
    assert max_difference(weights, single[1]) < TOLERANCE
    assert val == pytest.approx(single[2], abs=TOLERANCE)


def test_clipping_by_value_follows_the_plain_loop(gloo: ProcessPool) -> None:
    options = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
    losses, weights, _ = gloo.run(_fit, PACKAGES[0], {"replicate_size": 2}, world_size=4, **options)[0]
    plain_losses, plain_weights = _plain_loop(clip_value=0.002)
    assert losses == pytest.approx(plain_losses, abs=TOLERANCE)
    assert max_difference(weights, plain_weights) < TOLERANCE


def test_the_clipping_of_these_tests_changes_the_result() -> None:
    unclipped = _plain_loop()[1]
    assert max_difference(_plain_loop(clip=0.3)[1], unclipped) > 100 * TOLERANCE
    assert max_difference(_plain_loop(clip_value=0.002)[1], unclipped) > 100 * TOLERANCE


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
    torch.manual_seed(0)
    network = Network()
    optimizer = adamw(network)
    expected = []
    for _ in range(2):
        for tokens, targets in DataLoader(dataset(), batch_size=8):
            loss = loss_of(network(tokens), targets)
            loss.backward()
            expected.append(loss.item())
            _step(network, [optimizer], None, None)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert max_difference(weights, {f"network.{k}": v for k, v in network.state_dict().items()}) < 1e-5
