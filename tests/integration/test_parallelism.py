"""Tensor parallelism in a Trainer: models that configure_model divides as Lightning shows it, or that begin on meta."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.integration import training
from tests.support.processes import ProcessPool


def _train(options: dict[str, Any], *, divides: bool) -> dict[str, Tensor]:
    """Weights after an epoch; the model is divided by the module, as for Lightning's own strategy."""
    pl = training.load()
    model = training.language_model(pl)

    def configure_model(self: Any) -> None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in self.network.blocks:
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)
            fully_shard(block, mesh=self.device_mesh["data_parallel"])

    if divides:
        type(model).configure_model = configure_model
    del type(model).on_train_batch_end
    strategy = training.strategy_class()(optimizer=training.EXACT, **options)
    data = torch.utils.data.DataLoader(training.loader().dataset, batch_size=4 if divides else 8)
    training.trainer(pl, strategy=strategy, gradient_clip_val=0.3, max_epochs=1).fit(model, data)
    return training.full_weights(model)


@pytest.mark.parametrize(("options", "world_size"), [({}, 2), ({"tensor_size": 2, "replicate_size": 2}, 4)], ids=str)
def test_a_configure_model_for_lightnings_strategy_runs(gloo: ProcessPool, options: Any, world_size: int) -> None:
    expected = gloo.run(_train, {}, divides=False, world_size=1)[0]
    weights = gloo.run(_train, options, divides=True, world_size=world_size)[0]
    assert training.max_difference(weights, expected) < 5e-6


def _from_meta(directory: str, resume: str | None) -> dict[str, Tensor]:
    """A model without memory that is tensor parallel before it is sharded."""
    pl = training.load()
    model = training.language_model(pl)
    del type(model).on_train_batch_end

    def configure_model(self: Any) -> None:
        with torch.device("meta"):
            self.network = training.Network()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in self.network.blocks:
            parallelize_module(block, self.device_mesh["tensor"], plan)

    type(model).configure_model = configure_model
    del model.network
    strategy = training.strategy_class()(optimizer=training.EXACT, tensor_size=2)
    callback = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="{epoch}", save_top_k=-1)
    data = torch.utils.data.DataLoader(training.dataset(16), batch_size=4)
    fitter = training.trainer(pl, strategy=strategy, callbacks=[callback], enable_checkpointing=True)
    fitter.fit(model, data, ckpt_path=resume, weights_only=False)
    return training.full_weights(model)


def test_a_tensor_parallel_model_starts_on_meta_and_resumes(gloo: ProcessPool, tmp_path: Path) -> None:
    weights = gloo.run(_from_meta, str(tmp_path / "first"), None, world_size=4)[0]
    up = weights["network.blocks.0.up.weight"]
    assert up.isfinite().all()
    halves = up.chunk(2)
    assert not torch.equal(*halves), "tensor ranks draw different numbers"
    checkpoint = f"{tmp_path}/first/epoch=0.ckpt"
    resumed = gloo.run(_from_meta, str(tmp_path / "second"), checkpoint, world_size=4)[0]
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)
