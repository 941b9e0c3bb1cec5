"""Callbacks that ship with Lightning: each works, or is refused with a message that says what to use in its place."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_muon import MuonConfig
from tests.integration import training
from tests.support.processes import ProcessPool, RanksFailedError


def _finetune(
    directory: str, *, resume: str | None = None, sizes: dict[str, Any] | None = None
) -> tuple[list[float], dict[str, Any], list[tuple[int, float, float]]]:
    pl = training.load()

    class UnfreezeBlocks(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.network.blocks)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.network.blocks, optimizer, lr=5e-3)

    def configure(module: nn.Module) -> Any:
        trainable = [p for p in module.parameters() if p.requires_grad]
        return torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.03)

    model = training.language_model(pl, configure=configure)
    # Until the blocks train, nothing does that is a matrix.
    strategy = training.strategy_class()(**(sizes or {}), optimizer=MuonConfig(compute_dtype="float32"))
    callbacks = [UnfreezeBlocks(), pl.callbacks.ModelCheckpoint(dirpath=directory, filename="{epoch}", save_top_k=-1)]
    fitter = training.trainer(pl, strategy=strategy, callbacks=callbacks, enable_checkpointing=True, max_epochs=3)
    fitter.fit(model, training.loader(), training.loader(), ckpt_path=resume)
    groups = [(len(g["params"]), g["lr"], g["weight_decay"]) for g in fitter.optimizers[0].param_groups]
    return model.losses, training.full_weights(model), groups


def test_finetuning_adds_a_group_that_trains_and_resumes(gloo: ProcessPool, tmp_path: Path) -> None:
    single = gloo.run(_finetune, str(tmp_path / "single"), sizes={"sharding": "none"}, world_size=1)[0]
    for sizes in ({}, {"sharding": "zero2"}):
        losses, weights, groups = gloo.run(_finetune, str(tmp_path / "a"), sizes=sizes, world_size=2)[0]
        # The new group has the weight decay of the user's AdamW.
        assert groups == [(3, 1e-2, 0.03), (12, 5e-3, 0.03)]
        assert losses == pytest.approx(single[0], abs=1e-4)
        assert training.max_difference(weights, single[1]) < 1e-4
    again = {"resume": f"{tmp_path}/a/epoch=1.ckpt", "sizes": {"replicate_size": 2}}
    assert gloo.run(_finetune, str(tmp_path / "b"), **again, world_size=2)[0][2] == groups


def _logged_rates(folder: str) -> list[str]:
    pl = training.load()

    class TwoOptimizers(training.language_model(pl).__class__):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", 0.0)

        def configure_optimizers(self) -> Any:
            both = [torch.optim.AdamW(block.parameters(), lr=1e-2) for block in self.network.blocks]
            return both, [torch.optim.lr_scheduler.StepLR(each, 1) for each in both]

    logger, monitor = pl.loggers.CSVLogger(folder), pl.callbacks.LearningRateMonitor()
    fitter = training.trainer(pl, callbacks=[monitor], logger=logger, max_epochs=1, log_every_n_steps=1)
    fitter.fit(TwoOptimizers(), training.loader())
    return sorted(monitor.lrs)


def test_logged_rates_keep_the_names_of_the_users_optimizers(gloo: ProcessPool, tmp_path: Path) -> None:
    assert gloo.run(_logged_rates, str(tmp_path), world_size=1) == [["lr-AdamW", "lr-AdamW-1"]]


def _fail(directory: str, ranks: tuple[int, ...]) -> None:
    pl = training.load()

    class Failing(pl.Callback):
        def on_train_batch_end(self, fitter: Any, *_: Any) -> None:
            if fitter.global_step == 3 and dist.get_rank() in ranks:
                raise ArithmeticError("on purpose")

    callbacks = [Failing(), pl.callbacks.OnExceptionCheckpoint(directory)]
    fitter = training.trainer(pl, callbacks=callbacks, enable_checkpointing=True)
    fitter.fit(training.language_model(pl), training.loader())


def test_a_checkpoint_is_saved_when_all_ranks_fail(gloo: ProcessPool, tmp_path: Path) -> None:
    gloo.expect_error_on_all_ranks(
        _fail, str(tmp_path), (0, 1), world_size=2, exception=ArithmeticError, match="on purpose"
    )
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=False)["global_step"] == 3


def test_a_rank_that_fails_alone_says_that_it_cannot_save(gloo: ProcessPool, tmp_path: Path) -> None:
    """Ten seconds later: others may fail as well."""
    with pytest.raises(RanksFailedError) as caught:
        gloo.run_fresh(_fail, str(tmp_path), (1,), world_size=2, grace=20.0)
    assert "only 1 failed" in caught.value.failures[1].message
    assert not (tmp_path / "on_exception.ckpt").exists()
