"""Context and tensor parallelism in a Trainer: the weights of one process with whole sequences and whole layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_muon.sharding.context_parallel import split_sequence
from tests.integration import training
from tests.support.processes import ProcessPool


def _train(
    options: dict[str, Any], *, num_data_ranks: int, tokens: bool = False, by_lightning: bool = False, **kwargs: Any
) -> tuple[dict[str, Tensor], int]:
    """Weights after two epochs, and how many samples this rank has seen."""
    pl = training.load()
    model = training.language_model(pl)
    seen: list[int] = []

    def training_step(self: Any, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        seen.append(len(batch[0]))
        if "context_size" in options:
            batch = split_sequence(batch, self.device_mesh["context"])
        loss = training.loss_of(self.network(batch[0]), batch[1])
        if not tokens:
            return loss
        self.trainer.strategy.report_tokens(batch[1].numel())
        return loss * batch[1].numel()

    def configure_model(self: Any) -> None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in self.network.blocks:
            parallelize_module(block, self.device_mesh["tensor_parallel" if by_lightning else "tensor"], plan)
            if by_lightning:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])

    type(model).training_step = training_step
    if "tensor_size" in options or by_lightning:
        type(model).configure_model = configure_model
    del type(model).on_train_batch_end
    strategy = training.strategy_class()(
        optimizer=training.EXACT, loss_scaling="tokens" if tokens else "mean", **options
    )
    data = torch.utils.data.DataLoader(training.loader().dataset, batch_size=8 // num_data_ranks)
    training.trainer(pl, strategy=strategy, **kwargs).fit(model, data)
    return training.full_weights(model), sum(seen)


@pytest.mark.parametrize(
    ("options", "num_data_ranks", "tokens"),
    [
        ({"context_size": 2, "replicate_size": 2}, 2, False),
        ({"context_size": 2, "sharding": "zero2"}, 2, True),
        ({"tensor_size": 2, "replicate_size": 2}, 2, True),
        ({"tensor_size": 2, "context_size": 2}, 1, True),
    ],
    ids=str,
)
def test_weights_are_those_of_one_process(
    gloo: ProcessPool, options: dict[str, Any], num_data_ranks: int, tokens: bool
) -> None:
    kwargs = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "tokens": tokens}
    expected, num_samples = gloo.run(_train, {}, num_data_ranks=1, world_size=1, **kwargs)[0]
    results = gloo.run(_train, options, num_data_ranks=num_data_ranks, world_size=4, **kwargs)
    assert training.max_difference(results[0][0], expected) < 5e-6
    assert [seen for _, seen in results] == [num_samples // num_data_ranks] * 4


@pytest.mark.parametrize(("options", "world_size"), [({}, 2), ({"tensor_size": 2, "replicate_size": 2}, 4)], ids=str)
def test_a_configure_model_for_lightnings_strategy_runs(gloo: ProcessPool, options: Any, world_size: int) -> None:
    kwargs: dict[str, Any] = {"gradient_clip_val": 0.3, "max_epochs": 1}
    expected, _ = gloo.run(_train, {}, num_data_ranks=1, world_size=1, **kwargs)[0]
    kwargs |= {"num_data_ranks": 2, "by_lightning": True}
    weights, _ = gloo.run(_train, options, world_size=world_size, **kwargs)[0]
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
