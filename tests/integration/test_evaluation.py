"""Validation, test and prediction; before, during and after training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.integration import training
from tests.support.processes import ProcessPool


def _evaluate(package: str, directory: str, sharded: bool) -> None:
    pl = training.load(package)
    model = training.language_model(pl)
    callback = pl.callbacks.ModelCheckpoint(dirpath=directory, monitor="val", save_top_k=1)
    strategy = training.strategy_class(package)(save_distributed_checkpoint=sharded)
    fitter = training.trainer(
        pl, strategy=strategy, callbacks=[callback], enable_checkpointing=True, num_sanity_val_steps=2
    )
    before = fitter.validate(model, training.loader(), verbose=False)[0]["val"]
    fitter.fit(model, training.loader(), training.loader())
    after = fitter.validate(model, training.loader(), verbose=False)[0]["val"]
    best = fitter.test(model, training.loader(), ckpt_path="best", verbose=False)[0]["test"]
    score, other = float(callback.best_model_score), training.language_model(pl, seed=5)
    again = training.trainer(pl).validate(other, training.loader(), ckpt_path=callback.best_model_path, verbose=False)[
        0
    ]["val"]
    predictions = torch.cat(fitter.predict(model, training.loader(num_samples=8)))
    fitter.fit_loop.max_epochs = 3
    fitter.fit(model, training.loader(), training.loader())
    assert before > after
    assert [best, again] == pytest.approx([score, score], abs=1e-6), "also in a new Trainer"
    assert {type(parameter.data) for parameter in model.parameters()} == {DTensor}
    assert predictions.shape == (4, 6)
    assert fitter.global_step == 12


@pytest.mark.parametrize(("package", "sharded"), [(training.PACKAGES[0], True), (training.PACKAGES[1], False)])
def test_every_entry_point_works_in_any_order(gloo: ProcessPool, tmp_path: Path, package: str, sharded: bool) -> None:
    gloo.run(_evaluate, package, str(tmp_path), sharded, world_size=2)


def _unusual_steps() -> list[float]:
    pl = training.load()
    model = training.language_model(pl)

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        hidden = self.network.embedding(batch[0])
        for block in self.network.blocks:
            hidden = block(hidden)
        first = nn.functional.cross_entropy(self.network.head(hidden).flatten(0, 1), batch[1].flatten())
        second = nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.log("loss", first.detach(), sync_dist=True)
        return {"loss": (first + second) / 2, "other": hidden.detach()}

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, 0)["loss"], sync_dist=True)

    type(model).training_step = training_step
    type(model).validation_step = validation_step
    training.trainer(pl, strategy=training.strategy_class()(optimizer=training.EXACT)).fit(
        model, training.loader(), training.loader()
    )
    weights = training.full_weights(model)
    return [*model.losses, sum(w.double().sum().item() for w in weights.values())]


def test_steps_may_call_parts_of_the_model_and_the_model_again(gloo: ProcessPool) -> None:
    pair = gloo.run(_unusual_steps, world_size=2)[0]
    single = gloo.run(_unusual_steps, world_size=1)[0]
    assert pair == pytest.approx(single, abs=2e-4)
