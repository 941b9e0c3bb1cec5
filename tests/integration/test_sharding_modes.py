"""A Trainer with every kind of sharding: the same weights, resumed runs, checkpoints that go from one to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_muon
from tests.integration.training import (
    EXACT,
    PACKAGES,
    Network,
    full_weights,
    language_model,
    load,
    loader,
    max_difference,
    strategy_class,
    trainer,
)
from tests.support.processes import ProcessPool


def _run(
    directory: str = "",
    *,
    sharding: str,
    resume: str | None = None,
    single_file: bool = False,
    strategy: dict[str, Any] | None = None,
    tied: bool = False,
    **options: Any,
) -> tuple[list[float], dict[str, Any]]:
    """Train for up to two epochs; with a directory, keep a checkpoint of each epoch."""
    pl = load(PACKAGES[0])
    model = language_model(pl, network=lambda: Network(tied=tied), seed=1 if resume else 0)
    if directory:
        callback = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="{epoch}", save_top_k=-1)
        options |= {"callbacks": [callback], "enable_checkpointing": True}
    chosen = strategy_class(PACKAGES[0])(
        sharding=sharding, optimizer=EXACT, save_distributed_checkpoint=not single_file, **(strategy or {})
    )
    fitter = trainer(pl, strategy=chosen, **({"max_epochs": 2} | options))
    fitter.fit(model, loader(), ckpt_path=resume, weights_only=False)
    return model.losses, full_weights(model)


@pytest.mark.parametrize(
    ("sharding", "world_size", "options"),
    [
        ("zero2", 4, {"strategy": {"replicate_size": 2}, "gradient_clip_val": 0.3, "tied": True}),
        ("zero2", 2, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        ("ddp", 4, {"gradient_clip_val": 0.3, "accumulate_grad_batches": 4}),
        ("fsdp", 2, {"accumulate_grad_batches": 2, "strategy": {"reshard_after_backward": False}}),
    ],
    ids=str,
)
def test_weights_are_those_of_one_process(
    gloo: ProcessPool, sharding: str, world_size: int, options: dict[str, Any]
) -> None:
    alone = {key: value for key, value in options.items() if key != "strategy"}
    losses, weights = gloo.run(_run, sharding="none", world_size=1, **alone)[0]
    results = gloo.run(_run, sharding=sharding, world_size=world_size, **options)
    assert results[0][0] == pytest.approx(losses, abs=2e-5)
    assert max_difference(results[0][1], weights) < 5e-5


@pytest.mark.parametrize(
    ("sharding", "world_size", "options"),
    [
        ("zero2", 3, {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
        ("zero2", 2, {"single_file": True}),
        ("ddp", 2, {"single_file": True}),
    ],
    ids=str,
)
def test_a_resumed_run_is_bit_equal(
    gloo: ProcessPool, tmp_path: Path, sharding: str, world_size: int, options: dict[str, Any]
) -> None:
    kind = {"sharding": sharding, "world_size": world_size, **options}
    losses, weights = gloo.run(_run, str(tmp_path / "first"), **kind)[0]
    checkpoint = f"{tmp_path}/first/epoch=0.ckpt"
    assert Path(checkpoint).is_dir() != options.get("single_file", False)
    resumed = gloo.run(_run, str(tmp_path / "second"), resume=checkpoint, **kind)[0]
    assert resumed[0] == losses[len(losses) // 2 :]
    assert all(torch.equal(resumed[1][name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("saved", "loaded", "single_file"),
    [("zero2", "fsdp", False), ("fsdp", "zero2", True), ("ddp", "zero2", False), ("zero2", "ddp", True)],
)
def test_a_checkpoint_goes_on_with_another_sharding(
    gloo: ProcessPool, tmp_path: Path, saved: str, loaded: str, single_file: bool
) -> None:
    first = {"sharding": saved, "single_file": single_file, "world_size": 4}
    losses, weights = gloo.run(_run, str(tmp_path / "first"), **first)[0]
    second = {"sharding": loaded, "single_file": single_file, "resume": f"{tmp_path}/first/epoch=0.ckpt"}
    resumed = gloo.run(_run, str(tmp_path / "second"), **second, world_size=2)[0]
    assert resumed[0] == pytest.approx(losses[len(losses) // 2 :], abs=2e-5)
    assert max_difference(resumed[1], weights) < 5e-5


def _keep() -> None:
    pl = load(PACKAGES[0])
    model = language_model(pl, configure=lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    trainer(pl, strategy=strategy_class(PACKAGES[0])(sharding="zero2")).fit(model, loader())


def test_an_optimizer_that_reads_whole_gradients_is_an_error(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_keep, world_size=2, match="divides the gradients that SGD reads whole")


def _finetuned(sharding: str) -> dict[str, Any]:
    """The embedding is frozen for an epoch, and then joins the optimizer."""
    pl = load(PACKAGES[0])

    class Finetuning(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.network.embedding)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.network.embedding, optimizer, lr=1e-3)

    def trainable(module: nn.Module) -> Any:
        return lightning_muon.ParallelMuon([p for p in module.parameters() if p.requires_grad], lr=1e-2)

    model = language_model(pl, configure=trainable)
    chosen = strategy_class(PACKAGES[0])(sharding=sharding, optimizer=EXACT)
    fitter = trainer(pl, strategy=chosen, callbacks=[Finetuning()], max_epochs=2)
    fitter.fit(model, loader())
    return full_weights(model)


def test_parameters_may_join_the_optimizer_later(gloo: ProcessPool) -> None:
    alone = gloo.run(_finetuned, "none", world_size=1)[0]
    assert max_difference(gloo.run(_finetuned, "zero2", world_size=2)[0], alone) < 5e-2
    assert not torch.equal(alone["network.embedding.weight"], Network().embedding.weight)
