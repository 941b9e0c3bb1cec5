"""Gradients in a Trainer: scaled by tokens, clipped and logged, skipped when they are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_muon import NonFiniteGradientError, ParallelMuon
from tests.integration.training import (
    EXACT,
    LENGTH,
    PACKAGES,
    Network,
    full_weights,
    language_model,
    load,
    loader,
    max_difference,
    plain_loader,
    strategy_class,
    trainer,
)
from tests.support.processes import ProcessPool


def _sum_of_losses(network: nn.Module, batch: Sequence[Tensor], *, keep: bool = True) -> tuple[Tensor, int]:
    """Each row counts for as many tokens as its first word says, some for none."""
    tokens, targets = batch
    counted = torch.arange(LENGTH) < (tokens[:, :1] % LENGTH) * keep
    losses = F.cross_entropy(network(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * counted.flatten()).sum(), int(counted.sum())


def _by_tokens(package: str, sharding: str, accumulate: int, *, keep: bool = True, **options: Any) -> dict[str, Any]:
    pl = load(package)
    model = language_model(pl, configure=None)

    def training_step(self: Any, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss, count = _sum_of_losses(self.network, batch, keep=keep)
        self.trainer.strategy.report_tokens(count)
        return loss

    type(model).training_step = training_step
    # In the middle of an accumulated batch, through the same code.
    type(model).validation_step = training_step
    del type(model).on_train_batch_end
    strategy = strategy_class(package)(sharding=sharding, loss_scaling="tokens", optimizer=EXACT, **options)
    fitter = trainer(pl, strategy=strategy, accumulate_grad_batches=accumulate, val_check_interval=3)
    fitter.fit(model, loader(), loader())
    return full_weights(model)


def _whole_batch(accumulate: int) -> dict[str, Tensor]:
    """One process; gradients are divided by the tokens of the window, the last one of an epoch being shorter."""
    torch.manual_seed(0)
    network = Network()
    optimizer = ParallelMuon.from_config(network, EXACT)
    for epoch in range(2):
        batches = list(plain_loader(epoch))
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            losses, counts = zip(*(_sum_of_losses(network, batch) for batch in window), strict=True)
            optimizer.zero_grad()
            (sum(losses) / sum(counts)).backward()  # type: ignore[union-attr]
            optimizer.step()
    return {f"network.{name}": value for name, value in network.state_dict().items()}


@pytest.mark.parametrize(
    ("sharding", "world_size", "options", "accumulate"),
    [("fsdp", 4, {"replicate_size": 2}, 4), ("zero2", 4, {}, 1), ("zero2", 4, {}, 4), ("ddp", 2, {}, 4)],
    ids=str,
)
def test_gradients_are_divided_by_the_tokens_of_all_ranks(
    gloo: ProcessPool, sharding: str, world_size: int, options: dict[str, Any], accumulate: int
) -> None:
    weights = gloo.run(_by_tokens, PACKAGES[0], sharding, accumulate, world_size=world_size, **options)[0]
    assert max_difference(weights, _whole_batch(accumulate)) < 1e-6


def test_a_window_without_tokens_is_no_nan(gloo: ProcessPool) -> None:
    weights = gloo.run(_by_tokens, PACKAGES[0], "fsdp", 2, keep=False, world_size=2)[0]
    assert all(weight.isfinite().all() for weight in weights.values())


def _report_wrongly(package: str, what: str) -> None:
    pl = load(package)
    model = language_model(pl)
    if what == "needless":
        type(model).on_before_backward = lambda self, loss: self.trainer.strategy.report_tokens(3)
        trainer(pl).fit(model, loader())
    else:
        trainer(pl, strategy=strategy_class(package)(loss_scaling="tokens")).fit(model, loader())


@pytest.mark.parametrize(
    ("what", "exception", "match"),
    [("none", ValueError, "report_tokens"), ("needless", RuntimeError, "loss_scaling='tokens'")],
)
def test_a_wrong_report_of_tokens_is_an_error_on_all_ranks(
    gloo: ProcessPool, what: str, exception: type[Exception], match: str
) -> None:
    gloo.expect_error_on_all_ranks(_report_wrongly, PACKAGES[0], what, world_size=2, exception=exception, match=match)


def _norms(package: str, sharding: str, options: dict[str, Any], **kwargs: Any) -> list[dict[str, float]]:
    """What was logged after each step."""
    pl = load(package)
    model = language_model(pl)
    logged: list[dict[str, float]] = []
    type(model).on_train_batch_end = lambda self, *_: logged.append(
        {key: float(value) for key, value in self.trainer.callback_metrics.items()}
    )
    strategy = strategy_class(package)(sharding=sharding, optimizer=EXACT, **options)
    trainer(pl, strategy=strategy, max_epochs=1, **kwargs).fit(model, loader())
    return logged


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
def test_the_norm_before_clipping_is_logged(gloo: ProcessPool, sharding: str) -> None:
    kwargs = {"gradient_clip_val": 0.2, "accumulate_grad_batches": 2}
    alone = gloo.run(_norms, PACKAGES[0], "none", {}, world_size=1, **kwargs)[0]
    found = gloo.run(_norms, PACKAGES[0], sharding, {}, world_size=4, **kwargs)
    for logged in found:
        assert [step["grad_norm"] for step in logged[1::2]] == pytest.approx(
            [step["grad_norm"] for step in alone[1::2]], rel=1e-5
        )
    assert alone[-1]["grad_norm"] > 0.2


def _clipped_weights(package: str, sharding: str, options: dict[str, Any]) -> dict[str, Tensor]:
    pl = load(package)
    model = language_model(pl)
    strategy = strategy_class(package)(sharding=sharding, optimizer=EXACT, **options)
    trainer(pl, strategy=strategy, gradient_clip_val=1e-3, max_epochs=1).fit(model, loader())
    return full_weights(model)


def _clip_elementwise_alone() -> dict[str, Tensor]:
    torch.manual_seed(0)
    network = Network()
    groups = {"lr": 1e-2, "weight_decay": 0.05, "betas": (0.8, 0.9)}
    optimizer = ParallelMuon(network, compute_dtype="float32", **groups)
    matrices = [route.algorithm == "muon" for route in optimizer.routes]
    rest = [p for p, is_matrix in zip(network.parameters(), matrices, strict=True) if not is_matrix]
    assert 0 < len(rest) < len(matrices)
    for tokens, targets in plain_loader(0):
        optimizer.zero_grad()
        F.cross_entropy(network(tokens).flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(rest, 1e-3)
        optimizer.step()
    return {f"network.{name}": value for name, value in network.state_dict().items()}


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
def test_the_gradients_of_matrices_can_be_left_as_they_are(gloo: ProcessPool, sharding: str) -> None:
    options = {"clip_groups": "elementwise"}
    weights = gloo.run(_clipped_weights, PACKAGES[0], sharding, options, world_size=2)[0]
    assert max_difference(weights, _clip_elementwise_alone()) < 5e-5


def _poisoned(
    package: str, sharding: str, bad_steps: Sequence[int], configure: str, **kwargs: Any
) -> tuple[list[bool], float]:
    """Whether each step has changed the weights, and the logged counter; rank 1 has a NaN in some steps."""
    pl = load(package)
    make = {
        "muon": lambda module: ParallelMuon(module.parameters(), lr=1e-2),
        "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    }[configure]
    model = language_model(pl, configure=make)
    changed: list[bool] = []
    weights: list[Tensor] = []

    def local(module: nn.Module) -> list[Tensor]:
        return [getattr(p, "_local_tensor", p).detach().clone() for p in module.parameters()]

    class Poison(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            weights[:] = local(pl_module)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            changed.append(not all(map(torch.equal, weights, local(pl_module))))

    def training_step(self: Any, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]).flatten(0, 1), batch[1].flatten())
        return loss * float("nan") if batch_idx in bad_steps and dist.get_rank() == 1 else loss

    type(model).training_step = training_step
    del type(model).on_train_batch_end
    fitter = trainer(
        pl, strategy=strategy_class(package)(sharding=sharding), max_epochs=1, callbacks=[Poison()], **kwargs
    )
    fitter.fit(model, loader())
    return changed, float(fitter.callback_metrics.get("skipped_steps", 0.0))


@pytest.mark.parametrize(
    ("sharding", "configure", "kwargs"),
    [
        ("fsdp", "muon", {}),
        ("zero2", "muon", {"gradient_clip_val": 1.0}),
        ("fsdp", "sgd", {"gradient_clip_val": 1.0}),
        ("ddp", "sgd", {}),
    ],
    ids=str,
)
def test_a_nan_on_one_rank_skips_the_step_on_all(
    gloo: ProcessPool, sharding: str, configure: str, kwargs: dict[str, Any]
) -> None:
    bad_steps = (1, 2, 4)
    for changed, skipped in gloo.run(_poisoned, PACKAGES[0], sharding, bad_steps, configure, world_size=2, **kwargs):
        assert changed == [step not in bad_steps for step in range(6)]
        assert skipped == 3


@pytest.mark.parametrize(("sharding", "configure"), [("zero2", "muon"), ("fsdp", "sgd")])
def test_too_many_skipped_steps_in_a_row_stop_all_ranks(gloo: ProcessPool, sharding: str, configure: str) -> None:
    failures = gloo.expect_error_on_all_ranks(
        _poisoned, PACKAGES[0], sharding, range(6), configure,
        world_size=2, exception=NonFiniteGradientError, match=r"network\.\S+.*after 3 skipped steps in a row",
    )  # fmt: skip
    assert "network.embedding.weight" in failures[0].message
