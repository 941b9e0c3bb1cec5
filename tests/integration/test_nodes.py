"""A Trainer of nodes that exchange components of momenta, or train by themselves: evaluation, checkpoints, the end."""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_muon.flexdemo.config import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, DiLoCo, NoReplication
from lightning_muon.params.layout import local_tensor
from tests.integration import training
from tests.integration.training import PACKAGES, load, loader, trainer
from tests.support.processes import ProcessPool
from tests.support.tensors import are_equal

_EPOCH = 4  # Steps.


def _strategy(package: str, replicator: Any, *, nodes: int = 2, single_file: bool = False, base: Any = "adamw") -> Any:
    return training.strategy_class(package)(
        replicate_size=nodes,
        optimizer=FlexDeMoConfig(base=base, lr=2e-2, dense_below=100, check_every=1, replicator=replicator),
        save_distributed_checkpoint=not single_file,
    )


def _shards(module: nn.Module) -> dict[str, Tensor]:
    """Of this rank."""
    return {name: local_tensor(parameter.detach()).clone() for name, parameter in module.named_parameters()}


def _equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return are_equal(left.values(), right.values())


def _model(pl: Any, seed: int = 0) -> Any:
    """Notes the shards of this rank when the last step has ended."""
    model = training.language_model(pl, configure=None, seed=seed)
    type(model).on_train_end = lambda self: setattr(self, "own", _shards(self))
    return model


def _fit(
    directory: str, replicator: Any, *, package: str = PACKAGES[0], resume: str = "", after_fit: bool = False,
    evaluates: bool = False, strategy: dict[str, Any] = {}, **options: Any,  # noqa: B006
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:  # fmt: skip
    """Losses, the shards of this rank after the last step and after the training, and the residuals of all nodes."""
    pl = load(package)
    if directory and not after_fit:
        saving = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="{epoch}", save_top_k=-1)
        options |= {"callbacks": [saving], "enable_checkpointing": True}
    model = _model(pl, seed=1 if resume else 0)
    fitter = trainer(pl, strategy=_strategy(package, replicator, **strategy), **options)
    fitter.fit(model, loader(), loader() if evaluates else None, ckpt_path=resume or None)
    if after_fit:
        fitter.save_checkpoint(f"{directory}/epoch=0.ckpt")
    names = {parameter: name for name, parameter in model.named_parameters()}
    residuals = {
        names[parameter]: state["residual"].full_tensor().clone()
        for parameter, state in fitter.optimizers[0].state.items()
        if "residual" in state
    }
    return model.losses, getattr(model, "own", {}), _shards(model), residuals


@pytest.mark.parametrize(("saved", "loaded", "single_file"), [((2, 2), (3, 1), False), ((3, 1), (2, 1), True)])
def test_other_nodes_and_shards_keep_the_mean_of_residuals(
    gloo: ProcessPool, tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int], single_file: bool
) -> None:
    replicator = DCTTopK(chunk_size=8, top_k=4)

    def fit(directory: str, sizes: tuple[int, int], **options: Any) -> Any:
        strategy = {"nodes": sizes[0], "single_file": single_file}
        options |= {"strategy": strategy, "limit_train_batches": 2, "world_size": sizes[0] * sizes[1]}
        return gloo.run(_fit, directory, replicator, **options)[0]

    *_, before = fit(str(tmp_path), saved, max_epochs=1)
    # A run that has ended is loaded, and trains no further; then the nodes of now go on, with equal weights.
    losses, _, _, after = fit("", loaded, resume=f"{tmp_path}/epoch=0.ckpt", max_epochs=1)
    assert not losses and after.keys() == before.keys()
    assert any(not torch.equal(tensor[0], tensor[1]) for tensor in before.values()), "nodes have residuals of their own"
    for name, tensor in before.items():
        assert after[name].shape == (loaded[0], *tensor.shape[1:])
        assert all(torch.equal(own, tensor.mean(0)) for own in after[name])
    losses, *_ = fit("", loaded, resume=f"{tmp_path}/epoch=0.ckpt", max_epochs=2)
    assert len(losses) == 2 and all(map(math.isfinite, losses))


@pytest.mark.parametrize(
    ("replicator", "strategy", "options"),
    [
        (DiLoCo(period=3), {}, {"evaluates": True}),
        (DiLoCo(period=3), {"single_file": True, "base": "muon"}, {"after_fit": True}),
        (NoReplication(), {"single_file": True}, {}),
        (NoReplication(), {}, {}),
    ],
    ids=str,
)
def test_a_run_goes_on_from_the_weights_of_each_node(
    gloo: ProcessPool, tmp_path: Path, replicator: Any, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    """Saved while the average is evaluated, when it has been put into the module, or without any."""
    kind = {"strategy": strategy, "world_size": 2, **options}
    first = gloo.run(_fit, str(tmp_path), replicator, max_epochs=1, **kind)
    path, kind = f"{tmp_path}/epoch=0.ckpt", kind | {"after_fit": False}
    whole, resumed = gloo.run(_fit, "", replicator, **kind), gloo.run(_fit, "", replicator, resume=path, **kind)
    assert not _equal(first[0][1], first[1][1])
    for before, after in zip(whole, resumed, strict=True):
        assert after[0][-_EPOCH:] == before[0][-_EPOCH:]
        assert _equal(after[1], before[1]) and _equal(after[2], before[2])
    if isinstance(replicator, NoReplication):
        if not strategy:
            dcp_to_torch_save(path, path := f"{tmp_path}/one_file")
        assert _equal(torch.load(path)["state_dict"], first[0][1]), "the model is that of the first node"


def _scores(directory: str, replicator: Any, single_file: bool) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
    """Of the best checkpoint, of what is left after the training, and of a checkpoint of that; the weights, too."""
    pl = load()
    # The worst, so that it is not the one at the end.
    best = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="best", monitor="val", mode="max")
    options = {"callbacks": [best], "enable_checkpointing": True, "val_check_interval": 2, "max_steps": 10}

    def make(**options: Any) -> Any:
        return trainer(pl, strategy=_strategy(PACKAGES[0], replicator, single_file=single_file), **options)

    def score(path: str | None, fitter: Any = None) -> float:
        module = model if fitter else _model(pl)
        return (fitter or make()).validate(module, loader(), ckpt_path=path, verbose=False)[0]["val"]

    fitter, model = make(max_epochs=-1, **options), _model(pl)
    fitter.fit(model, loader(), loader())
    fitter.save_checkpoint(f"{directory}/end")
    left = _shards(model)
    found = {"left": score(None, fitter), "tested": fitter.test(model, loader(), verbose=False)[0]["test"]}
    assert _equal(left, _shards(model))
    found |= {"best": score(best.best_model_path), "end": score(f"{directory}/end")}
    found |= {"monitored": float(best.best_model_score), "again": score(best.best_model_path, fitter)}
    fitter.save_checkpoint(f"{directory}/again")
    return found | {"saved": score(f"{directory}/again")}, [model.own, left]


@pytest.mark.parametrize(("replicator", "single_file"), [(DiLoCo(period=4), False), (DiLoCo(period=3), True)], ids=str)
def test_the_score_of_a_model_is_that_of_its_checkpoint(
    gloo: ProcessPool, tmp_path: Path, replicator: Any, single_file: bool
) -> None:
    found = gloo.run(_scores, str(tmp_path), replicator, single_file, world_size=2)
    for scores, _ in found:
        assert scores["best"] == scores["monitored"] == scores["again"] == scores["saved"]
        assert scores["left"] == scores["tested"] == scores["end"]
    (own, left), (other_own, other_left) = (weights for _, weights in found)
    assert _equal(left, other_left), "the nodes end with the same weights"
    assert not _equal(own, other_own) and not _equal(own, left), "they had others before"


def test_validation_does_not_change_the_training(gloo: ProcessPool) -> None:
    """Also between the micro-batches of one step."""
    kind = {"world_size": 2, "accumulate_grad_batches": 2, "package": PACKAGES[1]}
    often = {"evaluates": True, "limit_val_batches": 1, "val_check_interval": 1}
    plain = gloo.run(_fit, "", DiLoCo(period=2), **kind)
    validated = gloo.run(_fit, "", DiLoCo(period=2), **often, **kind)
    for without, with_validation in zip(plain, validated, strict=True):
        assert without[0] == with_validation[0]
        assert _equal(without[1], with_validation[1])


def _failing() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What its validation sees before it fails, and what is left."""
    pl, shown = load(), dict[str, Tensor]()
    model = _model(pl)

    def validation_step(self: Any, *_: Any) -> None:
        shown.update(_shards(self))
        raise LookupError("on all ranks")

    type(model).validation_step = validation_step
    options = {"num_sanity_val_steps": 0, "val_check_interval": 3}
    with pytest.raises(LookupError, match="on all ranks"):
        trainer(pl, strategy=_strategy(PACKAGES[0], DiLoCo(period=2)), **options).fit(model, loader(), loader())
    return shown, _shards(model)


def test_an_error_in_validation_leaves_each_node_its_own_weights(gloo: ProcessPool) -> None:
    (shown, own), (shown_too, own_too) = gloo.run(_failing, world_size=2)
    assert _equal(shown, shown_too)
    assert not _equal(own, own_too) and not _equal(own, shown)


def _warned(num_steps: int) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        _fit("", DiLoCo(period=4), max_steps=num_steps, max_epochs=-1)
    return [str(warning.message) for warning in caught if "DiLoCo" in str(warning.message)]


def test_steps_that_no_average_has_are_told_at_the_end(gloo: ProcessPool) -> None:
    (message,), second = gloo.run(_warned, 3, world_size=2)
    assert "in the last 3 steps" in message and not second, "the first rank tells it"
    assert gloo.run(_warned, 4, world_size=2) == [[], []]
