"""Validation, test and prediction; before, during and after training."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.integration import training
from tests.support.processes import ProcessPool


class _Generates(training.Network):
    def generate(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def _evaluate(package: str, directory: str, sharded: bool) -> None:
    pl = training.load(package)
    model = training.language_model(pl, network=_Generates)
    tokens = torch.zeros(1, training.LENGTH, dtype=torch.long)
    # Hooks may call a part of the model, whose weights are shards by then.
    model.on_validation_epoch_end = lambda: (model.network(tokens), model.network.generate(tokens))
    callback = pl.callbacks.ModelCheckpoint(dirpath=directory, monitor="val", save_top_k=1)
    strategy = training.strategy_class(package)(save_distributed_checkpoint=sharded)
    fitter = training.trainer(
        pl, strategy=strategy, callbacks=[callback], enable_checkpointing=True, num_sanity_val_steps=2
    )
    before = fitter.validate(model, training.loader(), verbose=False)[0]["val"]
    fitter.fit(model, training.loader(), training.loader())
    after = fitter.validate(model, training.loader(), verbose=False)[0]["val"]
    best = fitter.test(model, training.loader(), ckpt_path="best", verbose=False)[0]["test"]
    score, other = float(callback.best_model_score), training.language_model(pl, network=_Generates, seed=5)
    path = callback.best_model_path
    again = training.trainer(pl).validate(other, training.loader(), ckpt_path=path, verbose=False)[0]["val"]
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
