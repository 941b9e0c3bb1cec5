"""A Trainer whose nodes train by themselves between two averages: what it evaluates, saves, and leaves behind."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo
from tests.integration.training import PACKAGES, language_model, load, loader, strategy_class, trainer
from tests.support.processes import ProcessPool

_EPOCH = 4  # Steps.


def _strategy(package: str, replicator: Any, *, nodes: int = 2, single_file: bool = False, **config: Any) -> Any:
    options = {"base": "adamw", "lr": 2e-2, "dense_below": 100, "replicator": replicator}
    return strategy_class(package)(
        replicate_size=nodes,
        optimizer=FlexDeMoConfig(**(options | config)),
        save_distributed_checkpoint=not single_file,
    )


def _shards(module: nn.Module) -> dict[str, Tensor]:
    """Of this rank."""
    local = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in module.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in local.items()}


def _equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def _model(pl: Any, *, fails: bool = False) -> Any:
    """Notes the shards of this rank when the last step has ended."""
    model = language_model(pl, configure=None)

    def on_train_end(self: Any) -> None:
        self.own = _shards(self)

    def validation_step(self: Any, *_: Any) -> None:
        self.shown = _shards(self)
        raise LookupError("on all ranks")

    type(model).on_train_end = on_train_end
    if fails:
        type(model).validation_step = validation_step
    return model


def _scores(package: str, directory: str, replicator: Any, single_file: bool) -> dict[str, Any]:
    """Of the best checkpoint, of what is left after the training, and of a checkpoint of that."""
    pl = load(package)
    # The worst, so that it is not the one at the end.
    best = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="best", monitor="val", mode="max")
    options = {"callbacks": [best], "enable_checkpointing": True, "val_check_interval": 2, "max_steps": 10}
    make = lambda: _strategy(package, replicator, single_file=single_file)  # noqa: E731
    fitter = trainer(pl, strategy=make(), max_epochs=-1, **options)
    model = _model(pl)
    fitter.fit(model, loader(), loader())
    fitter.save_checkpoint(f"{directory}/end")
    left = _shards(model)
    found = {
        "left": fitter.validate(model, loader(), verbose=False)[0]["val"],
        "tested": fitter.test(model, loader(), verbose=False)[0]["test"],
    }
    assert _equal(left, _shards(model))
    for name, path in (("best", best.best_model_path), ("end", f"{directory}/end")):
        [scores] = trainer(pl, strategy=make()).validate(_model(pl), loader(), ckpt_path=path, verbose=False)
        found[name] = scores["val"]
    [again] = fitter.validate(model, loader(), ckpt_path=best.best_model_path, verbose=False)
    fitter.save_checkpoint(f"{directory}/again")
    [saved] = trainer(pl, strategy=make()).validate(_model(pl), loader(), ckpt_path=f"{directory}/again", verbose=False)
    return found | {"monitored": float(best.best_model_score), "again": again["val"], "saved": saved["val"], "own": (
        model.own, left
    )}  # fmt: skip


@pytest.mark.parametrize(("replicator", "single_file"), [(DiLoCo(period=4), False), (DiLoCo(period=3), True)], ids=str)
def test_the_score_of_a_model_is_that_of_its_checkpoint(
    gloo: ProcessPool, tmp_path: Path, replicator: Any, single_file: bool
) -> None:
    found = gloo.run(_scores, PACKAGES[0], str(tmp_path), replicator, single_file, world_size=2)
    for scores in found:
        assert scores["best"] == scores["monitored"] == scores["again"] == scores["saved"]
        assert scores["left"] == scores["tested"] == scores["end"]
    own, left = zip(*(scores["own"] for scores in found), strict=True)
    assert _equal(left[0], left[1]), "the nodes end with the same weights"
    assert not _equal(own[0], own[1]) and not _equal(own[0], left[0]), "they had others before"


def _fit(
    package: str, directory: str, replicator: Any, *, resume: str = "", after_fit: bool = False, **options: Any
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the shards of this rank after the last step, and after the training."""
    pl = load(package)
    config = {key: options.pop(key) for key in ("single_file", "nodes", "base") if key in options}
    if directory and not after_fit:
        saving = pl.callbacks.ModelCheckpoint(
            dirpath=directory, filename="{epoch}", save_top_k=-1, monitor="val", save_on_train_epoch_end=False
        )
        options |= {"callbacks": [saving], "enable_checkpointing": True}
    model = _model(pl)
    fitter = trainer(pl, strategy=_strategy(package, replicator, **config), **options)
    fitter.fit(model, loader(), loader() if options.get("limit_val_batches") else None, ckpt_path=resume or None)
    if after_fit:
        fitter.save_checkpoint(f"{directory}/epoch=0.ckpt")
    return model.losses, model.own, _shards(model)


@pytest.mark.parametrize(
    ("replicator", "options"),
    [
        (DiLoCo(period=3), {"world_size": 2}),
        (DiLoCo(period=3), {"world_size": 2, "after_fit": True, "single_file": True, "base": "muon"}),
    ],
    ids=str,
)
def test_a_run_goes_on_from_the_weights_of_each_node(
    gloo: ProcessPool, tmp_path: Path, replicator: Any, options: dict[str, Any]
) -> None:
    """Saved while the average is evaluated, or when it has been put into the module."""
    kind = {"limit_val_batches": 2, **options}
    first = gloo.run(_fit, PACKAGES[0], str(tmp_path), replicator, max_epochs=1, **kind)
    whole = gloo.run(_fit, PACKAGES[0], "", replicator, **kind | {"after_fit": False})
    resume = f"{tmp_path}/epoch=0.ckpt"
    resumed = gloo.run(_fit, PACKAGES[0], "", replicator, resume=resume, **kind | {"after_fit": False})
    assert not _equal(first[0][1], first[-1][1])
    for before, after in zip(whole, resumed, strict=True):
        assert after[0][-_EPOCH:] == before[0][-_EPOCH:]
        assert _equal(after[1], before[1]) and _equal(after[2], before[2])


def test_validation_does_not_change_the_training(gloo: ProcessPool) -> None:
    """Also between the micro-batches of one step."""
    kind = {"world_size": 2, "accumulate_grad_batches": 2}
    plain = gloo.run(_fit, PACKAGES[1], "", DiLoCo(period=2), **kind)
    validated = gloo.run(_fit, PACKAGES[1], "", DiLoCo(period=2), limit_val_batches=1, val_check_interval=1, **kind)
    for without, with_validation in zip(plain, validated, strict=True):
        assert without[0] == with_validation[0]
        assert _equal(without[1], with_validation[1])


def _failing(package: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    pl = load(package)
    model = _model(pl, fails=True)
    options = {"num_sanity_val_steps": 0, "val_check_interval": 3}
    with pytest.raises(LookupError, match="on all ranks"):
        trainer(pl, strategy=_strategy(package, DiLoCo(period=2)), **options).fit(model, loader(), loader())
    return model.shown, _shards(model)


def test_an_error_in_validation_leaves_each_node_its_own_weights(gloo: ProcessPool) -> None:
    (shown, own), (shown_too, own_too) = gloo.run(_failing, PACKAGES[0], world_size=2)
    assert _equal(shown, shown_too)
    assert not _equal(own, own_too) and not _equal(own, shown)


def test_a_state_of_another_algorithm_is_refused(gloo: ProcessPool, tmp_path: Path) -> None:
    kind: dict[str, Any] = {"single_file": True, "world_size": 2}
    once = {"after_fit": True, "max_epochs": 1, "limit_train_batches": 1}
    gloo.run(_fit, PACKAGES[0], str(tmp_path), DiLoCo(period=1), **kind, **once)
    gloo.expect_error_on_all_ranks(
        _fit, PACKAGES[0], "", DCTTopK(chunk_size=8, top_k=4), **kind, resume=f"{tmp_path}/epoch=0.ckpt",
        exception=RuntimeError, match="does not fit FlexDeMo.*was saved with DiLoCo",
    )  # fmt: skip


def _warned(package: str, num_steps: int) -> list[str]:
    pl = load(package)
    with warnings.catch_warnings(record=True, action="always") as caught:
        fitter = trainer(pl, strategy=_strategy(package, DiLoCo(period=4)), max_steps=num_steps, max_epochs=-1)
        fitter.fit(_model(pl), loader())
    return [str(warning.message) for warning in caught if "DiLoCo" in str(warning.message)]


def test_steps_that_no_average_has_are_told_at_the_end(gloo: ProcessPool) -> None:
    (message,), second = gloo.run(_warned, PACKAGES[0], 3, world_size=2)
    assert "in the last 3 steps" in message and not second, "the first rank tells it"
    assert gloo.run(_warned, PACKAGES[0], 4, world_size=2) == [[], []]
