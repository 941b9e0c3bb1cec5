"""Numbers in a Trainer: precisions compute in what they say, a NaN skips a step, evaluations see what was saved."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_muon import NonFiniteGradientError, ParallelMuon
from lightning_muon.params.layout import local_tensor
from tests.integration import training
from tests.support.processes import ProcessPool
from tests.support.tensors import are_equal


def _poisoned(
    sharding: str,
    bad_steps: Sequence[int],
    configure: str,
    *,
    saves: str | None = None,
    resumes: str | None = None,
    **kwargs: Any,
) -> tuple[list[bool], float]:
    """Whether each step has changed the weights, and the logged counter; rank 1 has a NaN in some steps."""
    pl = training.load()
    make = {
        "muon": lambda module: ParallelMuon(module.parameters(), lr=1e-2),
        "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    }[configure]
    model = training.language_model(pl, configure=make)
    changed: list[bool] = []
    weights: list[Tensor] = []

    class Poison(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            weights[:] = [local_tensor(each.detach()).clone() for each in pl_module.parameters()]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            changed.append(not are_equal(weights, map(local_tensor, pl_module.parameters())))

    def training_step(self: Any, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]).flatten(0, 1), batch[1].flatten())
        return loss * float("nan") if batch_idx in bad_steps and dist.get_rank() == 1 else loss

    type(model).training_step = training_step
    strategy = training.strategy_class()(sharding=sharding)
    fitter = training.trainer(pl, strategy=strategy, **({"max_epochs": 1, "callbacks": [Poison()]} | kwargs))
    fitter.fit(model, training.loader(num_samples=48), ckpt_path=resumes, weights_only=False)
    if saves is not None:
        fitter.save_checkpoint(saves)
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
    for changed, skipped in gloo.run(_poisoned, sharding, bad_steps, configure, world_size=2, **kwargs):
        assert changed == [step not in bad_steps for step in range(6)]
        assert skipped == 3


@pytest.mark.parametrize(("sharding", "configure"), [("zero2", "muon"), ("fsdp", "sgd")])
def test_too_many_skipped_steps_also_behind_a_checkpoint_stop_all_ranks(
    gloo: ProcessPool, tmp_path: Path, sharding: str, configure: str
) -> None:
    saved = str(tmp_path / "saved.ckpt")
    gloo.run(_poisoned, sharding, (1, 4, 5), configure, saves=saved, world_size=2)
    failures = gloo.expect_error_on_all_ranks(
        _poisoned, sharding, (0, 1), configure, resumes=saved, max_epochs=2, world_size=2,
        exception=NonFiniteGradientError, match=r"network\.\S+.*after 3 skipped steps in a row \(4 in all\)",
    )  # fmt: skip
    assert "network.embedding.weight" in failures[0].message


def _dtypes(precision: str) -> dict[str, Any]:
    pl, seen = training.load(), dict[str, Any]()
    model = training.language_model(pl)
    block = model.network.blocks[0]
    block.register_forward_pre_hook(lambda _, args: seen.update(weight=block.up.weight.dtype, input=args[0].dtype))
    kind = type(model)
    kind.on_before_backward = lambda self, loss: seen.update(loss=loss.dtype)
    kind.on_after_backward = lambda self: seen.update(gradient={p.grad.dtype for p in self.parameters()})
    training.trainer(pl, precision=precision, max_epochs=1).fit(model, training.loader())
    return seen | {"parameter": next(model.parameters()).dtype}


_FLOAT, _BFLOAT = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("32-true", dict.fromkeys(("weight", "input", "loss", "parameter"), _FLOAT) | {"gradient": {_FLOAT}}),
        ("bf16-mixed", {"weight": _BFLOAT, "input": _BFLOAT, "loss": _FLOAT, "parameter": _FLOAT,
                        "gradient": {_FLOAT}}),
        ("bf16-true", dict.fromkeys(("weight", "input", "loss", "parameter"), _BFLOAT) | {"gradient": {_BFLOAT}}),
    ],
)  # fmt: skip
def test_a_precision_computes_in_what_it_says(gloo: ProcessPool, precision: str, expected: Any) -> None:
    for seen in gloo.run(_dtypes, precision, world_size=2):
        assert seen == expected


def _regression() -> tuple[float, Tensor]:
    """A target as training_step gets it, and the running mean that is left."""
    pl, seen = training.load(), list[float]()

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch[1][0].item())
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

    data = TensorDataset(torch.arange(8.0).view(4, 2), torch.full((4, 1), 1000.125))
    model, loader = Regression(), DataLoader(data, batch_size=2)
    training.trainer(pl, precision="bf16-mixed").fit(model, loader, loader)
    return seen[0], model.net[1].running_mean


def test_mixed_precision_rounds_no_batch_and_no_statistics(gloo: ProcessPool) -> None:
    """Batch norms end as on rank 0."""
    (target, first), (_, second) = gloo.run(_regression, world_size=2)
    assert target == 1000.125
    assert first.dtype == torch.float32 and torch.equal(first, second) and first.abs().max() > 0


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
