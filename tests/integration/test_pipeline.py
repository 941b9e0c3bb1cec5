"""A Trainer with pipeline_size: the weights, metrics and checkpoints of one process."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.integration import training
from tests.support.processes import ProcessPool, RanksFailedError
from tests.support.programs import ROOT, run_program

_ROWS, _NUM_BATCHES = 16, 2
# Sums of float32 in another order; Newton-Schulz makes more of it where a gradient has small singular values.
_TOLERANCE = 5e-6
Weights = dict[str, Tensor]


def _batches(*, shares: int = 1, share: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Two batches, or the rows of one data rank."""
    both = (part.split(_ROWS) for part in training.dataset(_ROWS * _NUM_BATCHES).tensors)
    return [(inputs[share::shares], labels[share::shares]) for inputs, labels in zip(*both, strict=True)]


def _sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def _two_groups(module: Any) -> Any:
    """One of them is that of the first stage alone; with a scheduler."""
    embedding = list(module.network.embedding.parameters())
    others = [parameter for name, parameter in module.network.named_parameters() if "embedding" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": embedding, "weight_decay": 0.0}, {"params": others}], lr=1e-2, weight_decay=0.1
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _network() -> nn.Module:
    return training.Network(num_blocks=4)


def _model(pl: Any, configure: Any = training.adamw) -> Any:
    model = training.language_model(pl, network=_network, configure=configure)
    kind: Any = type(model)
    del kind.on_train_batch_end
    kind.pipeline_parts = lambda self: [self.network.embedding, *self.network.blocks, self.network.head]
    kind.pipeline_loss = lambda _, output, targets: (_sum_of_losses(output, targets), (targets != -100).sum())
    return model


def _weights(module: nn.Module) -> Weights:
    """Whole weights of this rank's stages, under the names of the model."""
    named = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in named.items()}


def _fit(
    options: dict[str, Any],
    *,
    groups: bool = False,
    evaluates: bool = False,
    num_fits: int = 1,
    **kwargs: Any,
) -> tuple[Weights, dict[str, float], list[Tensor]]:
    """Weights after four steps, metrics, and predictions."""
    pl = training.load()
    model = _model(pl, _two_groups if groups else training.adamw)
    num_data_ranks = dist.get_world_size() // options.get("pipeline_size", 1)
    data = _batches(shares=num_data_ranks, share=dist.get_rank() % num_data_ranks)
    loader = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    whole = DataLoader(_batches(), batch_size=None)  # type: ignore[arg-type]
    metrics: dict[str, float] = {}
    fitter: Any = None
    for _ in range(num_fits):
        strategy = training.strategy_class()(**({"optimizer": training.EXACT} | options))
        kwargs = {"use_distributed_sampler": False, "max_epochs": 2 // num_fits} | kwargs
        fitter = training.trainer(pl, strategy=strategy, **kwargs)
        fitter.fit(model, loader, whole if evaluates else None)
        metrics |= {key: float(value) for key, value in fitter.callback_metrics.items()}
    weights, predictions = _weights(model), []
    if evaluates:
        (tested,) = fitter.test(model, whole, verbose=False)
        metrics |= {key: float(value) for key, value in tested.items()}
        predictions = fitter.predict(model, whole)
    return weights, metrics, predictions


def _difference(results: Sequence[tuple[Any, ...]], expected: Weights) -> float:
    """Largest one of any rank; together they have all weights."""
    assert {name for weights, *_ in results for name in weights} == set(expected)
    assert all(len(weights) < len(expected) for weights, *_ in results)
    pairs = [(value, expected[name]) for weights, *_ in results for name, value in weights.items()]
    return max((value - wanted).abs().max().item() for value, wanted in pairs)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zb_v, clipped, two groups": (
        {"pipeline_size": 2, "pipeline_schedule": "zb_v"},
        {"gradient_clip_val": 0.3, "groups": True, "evaluates": True},
    ),
    "1f1b, fit twice": ({"pipeline_size": 2}, {"num_fits": 2, "evaluates": True}),
    "a stage without matrices": (
        {"pipeline_size": 2, "pipeline_split": ["network.embedding", "network.blocks.0"]}, {"gradient_clip_val": 0.3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process(gloo: ProcessPool, name: str) -> None:
    options, kwargs = CASES[name]
    expected, metrics, predictions = gloo.run(_fit, {}, world_size=1, **kwargs)[0]
    results = gloo.run(_fit, options, world_size=2, **kwargs)
    assert _difference(results, expected) < _TOLERANCE
    if "gradient_clip_val" in kwargs:  # A factor of all gradients shows here only: a step of Muon has its own length.
        assert [own["grad_norm"] for _, own, _ in results] == pytest.approx([metrics["grad_norm"]] * 2, 1e-5)
    for _, own, predicted in results if "evaluates" in kwargs else ():
        wanted = {"val": metrics["val"], "test": metrics["test"], "train_loss": metrics["loss"]}
        assert {key: own[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)
        assert len(predicted) == _NUM_BATCHES and all(map(torch.equal, predicted, predictions))


def _other_batch_of_one_rank() -> None:
    pl = training.load()
    data = _batches(shares=2, share=dist.get_rank() % 2)
    if dist.get_rank() == 3:
        data[1] = (data[1][0][:-1], data[1][1][:-1])
    fitter = training.trainer(
        pl, strategy=training.strategy_class()(pipeline_size=2, shard_size=2), use_distributed_sampler=False
    )
    fitter.fit(_model(pl), DataLoader(data, batch_size=None))  # type: ignore[arg-type]


def test_other_batches_of_one_pipeline_end_all_of_them() -> None:
    with pytest.raises(RanksFailedError) as raised:
        ProcessPool().run_fresh(_other_batch_of_one_rank)
    assert all("have different batches" in raised.value.failures[rank].message for rank in (1, 3))
    assert raised.value.exit_codes == {0: 1, 2: 1}  # Those of the other pipeline.
    for rank in (0, 2):
        assert re.search(rf"rank {rank} ends: rank [13] has failed: .* different batches", str(raised.value))


def _order(directory: str, resume: str | None) -> list[tuple[int, list[int]]]:
    """Epoch and samples of each batch, as Lightning's own sampler draws them."""
    pl, order = training.load(), list[tuple[int, list[int]]]()
    model = _model(pl)
    type(model).on_train_batch_start = lambda self, batch, _: order.append(
        (self.current_epoch, batch[0][:, 0].tolist())
    )
    callback = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="{epoch}", save_top_k=-1)
    strategy = training.strategy_class()(pipeline_size=2)
    fitter = training.trainer(pl, strategy=strategy, callbacks=[callback], enable_checkpointing=True)
    loader = DataLoader(training.dataset(), batch_size=8, num_workers=1)
    fitter.fit(model, loader, ckpt_path=resume, weights_only=False)
    return order


def test_a_resumed_run_draws_the_samples_of_its_epoch(gloo: ProcessPool, tmp_path: Path) -> None:
    whole = gloo.run(_order, str(tmp_path / "whole"), None)
    resumed = gloo.run(_order, str(tmp_path / "rest"), f"{tmp_path}/whole/epoch=0.ckpt")
    for before, after in zip(whole, resumed, strict=True):
        assert after == [(epoch, rows) for epoch, rows in before if epoch == 1]
    assert whole[0] == whole[2] and whole[1] == whole[3] and whole[0] != whole[1]


def _raise_in_loss(schedule: str) -> float:
    pl = training.load()
    model = _model(pl)
    begin = time.monotonic()

    def fail(*_: Any) -> Any:
        nonlocal begin
        begin = time.monotonic()
        raise OSError("file 4")

    model.pipeline_loss = fail
    strategy = training.strategy_class()(pipeline_size=2, pipeline_schedule=schedule)
    fitter = training.trainer(pl, strategy=strategy, use_distributed_sampler=False)
    try:
        fitter.fit(model, DataLoader(_batches(), batch_size=None))  # type: ignore[arg-type]
    except OSError:
        assert time.monotonic() - begin < 15.0
        os._exit(3)  # As a program ends that does not catch it; the worker of this test would live on.
    return 0.0


@pytest.mark.parametrize(("schedule", "rank"), [("1f1b", 1), ("zb_v", 0)])
def test_an_error_of_one_rank_ends_all_of_them(schedule: str, rank: int) -> None:
    with pytest.raises(RanksFailedError) as raised:
        ProcessPool().run_fresh(_raise_in_loss, schedule, world_size=2, timeout=60.0)
    assert raised.value.exit_codes == {rank: 3, 1 - rank: 1}
    assert f"rank {1 - rank} ends: rank {rank} has failed: OSError: file 4" in str(raised.value)


@pytest.mark.long
def test_the_examples_run(tmp_path: Path) -> None:
    # Two processes each, which the launcher has started.
    trained = ("--steps", "2", "--shard-size", "1", "--schedule", "zb_h1")
    assert "validation loss" in run_program(
        ROOT / "examples" / "pipeline_gpt.py", *trained, directory=tmp_path, num_ranks=2
    )
    cut = run_program(ROOT / "examples" / "pipeline_t5.py", "--steps", "2", directory=tmp_path, num_ranks=2)
    assert "loss " in cut
    loop = run_program(ROOT / "examples" / "pipeline_loop.py", "--steps", "2", directory=tmp_path, num_ranks=2)
    assert "step 2: loss" in loop and "The statement " in loop
    table = run_program(ROOT / "examples" / "schedules.py", directory=tmp_path)
    assert "\ndual_pipe_v            2    26.80" in table
