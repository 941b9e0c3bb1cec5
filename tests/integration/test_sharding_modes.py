"""A Trainer with every kind of sharding: resumed runs, checkpoints that go from one to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.training import (
    EXACT,
    PACKAGES,
    full_weights,
    language_model,
    load,
    loader,
    max_difference,
    strategy_class,
    trainer,
)
from tests.support.processes import ProcessPool


def _run(directory: str, *, sharding: str, single_file: bool, resume: str = "") -> tuple[list[float], dict[str, Any]]:
    """Train for two epochs and keep a checkpoint of each."""
    pl = load(PACKAGES[0])
    model = language_model(pl, seed=1 if resume else 0)
    callback = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="{epoch}", save_top_k=-1)
    strategy = strategy_class(PACKAGES[0])(
        sharding=sharding, optimizer=EXACT, save_distributed_checkpoint=not single_file
    )
    options = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "enable_checkpointing": True}
    fitter = trainer(pl, strategy=strategy, callbacks=[callback], **options)
    fitter.fit(model, loader(), ckpt_path=resume or None, weights_only=False)
    return model.losses, full_weights(model)


@pytest.mark.parametrize(
    ("saved", "single_file", "readers"),
    [
        (("zero2", 3), False, [("zero2", 3)]),
        (("zero2", 2), True, [("zero2", 2), ("ddp", 4)]),
        (("ddp", 2), True, [("ddp", 2)]),
        (("zero2", 4), False, [("fsdp", 2)]),
        (("fsdp", 4), True, [("zero2", 2)]),
        (("ddp", 4), False, [("zero2", 2)]),
    ],
)
def test_a_run_is_resumed_with_the_same_or_another_sharding(
    gloo: ProcessPool, tmp_path: Path, saved: tuple[str, int], single_file: bool, readers: list[tuple[str, int]]
) -> None:
    def run(folder: str, kind: tuple[str, int], resume: str = "") -> tuple[list[float], dict[str, Any]]:
        options = {"sharding": kind[0], "single_file": single_file, "resume": resume}
        return gloo.run(_run, str(tmp_path / folder), world_size=kind[1], **options)[0]

    losses, weights = run("first", saved)
    checkpoint = tmp_path / "first" / "epoch=0.ckpt"
    assert checkpoint.is_dir() != single_file
    for reader in readers:
        resumed_losses, resumed = run("second", reader, str(checkpoint))
        if reader == saved:
            assert resumed_losses == losses[len(losses) // 2 :]
            assert all(torch.equal(resumed[name], weights[name]) for name in weights)
        else:
            assert resumed_losses == pytest.approx(losses[len(losses) // 2 :], abs=2e-5)
            assert max_difference(resumed, weights) < 5e-5


def _keep() -> None:
    pl = load(PACKAGES[0])
    model = language_model(pl, configure=lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    trainer(pl, strategy=strategy_class(PACKAGES[0])(sharding="zero2")).fit(model, loader())


def test_an_optimizer_that_reads_whole_gradients_is_an_error(gloo: ProcessPool) -> None:
    gloo.expect_error_on_all_ranks(_keep, world_size=2, match="divides the gradients that SGD reads whole")
