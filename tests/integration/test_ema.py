"""EMAWeights: the averages of EMAWeightAveraging in one process, evaluated, saved, and resumed on other ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DiLoCo
from lightning_muon.integrations.registry import make
from tests.integration import training
from tests.support.processes import ProcessPool

_DECAY = 0.8


def _trainer(callbacks: list[Any], sharding: dict[str, Any] | None = None, **options: Any) -> Any:
    strategy = make("ParallelMuonStrategy", "lightning.pytorch")(optimizer=training.EXACT, **(sharding or {}))
    return training.trainer(training.load(), strategy=strategy, callbacks=callbacks, num_sanity_val_steps=0, **options)


def _fit(
    directory: str | None, *, epochs: int = 3, resume: str = "", ours: bool = True, every: int = 1, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """What validation saw after each epoch, and the weights at the end, on rank 0.

    A run that may ``resume`` is of the same model or of one with ``"more"``, a frozen weight.
    """
    pl, seen = training.load(), list[float]()
    ema = (
        make("EMAWeights", "lightning.pytorch")(_DECAY, every_n_steps=every)
        if ours
        else pl.callbacks.EMAWeightAveraging(decay=_DECAY, update_every_n_steps=every)
    )
    note = pl.callbacks.LambdaCallback(
        on_validation_epoch_end=lambda trainer, _: seen.append(float(trainer.callback_metrics["val"]))
    )
    saving = pl.callbacks.ModelCheckpoint(dirpath=directory, filename="saved", enable_version_counter=False)
    callbacks = [ema, note, saving] if directory else [ema, note]
    fitter = _trainer(callbacks, options, enable_checkpointing=directory is not None, max_epochs=epochs)
    model, path = training.language_model(pl, seed=int(resume != "")), f"{directory}/saved.ckpt" if resume else None
    if resume == "more":
        model.strict_loading, model.more = False, nn.Parameter(torch.ones(4, 3), requires_grad=False)
        type(model).configure_optimizers = lambda self: training.adamw(self.network)
    fitter.fit(model, training.loader(), training.loader(), ckpt_path=path)
    return seen, training.full_weights(model)


_EXPECTED: dict[int, Any] = {}


def _expected(gloo: ProcessPool, every: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    if every not in _EXPECTED:
        options = {"sharding": "none", "ours": False, "every": every}
        _EXPECTED[every] = gloo.run(_fit, None, **options, world_size=1)[0]
    return _EXPECTED[every]


@pytest.mark.parametrize(
    ("options", "every", "world_size"),
    [({}, 3, 2), ({"replicate_size": 2, "shard_size": 2}, 1, 4), ({"sharding": "zero2"}, 1, 2)],
    ids=str,
)
def test_averages_are_those_of_one_process(
    gloo: ProcessPool, options: dict[str, Any], every: int, world_size: int
) -> None:
    seen, weights = _expected(gloo, every)
    for rank, (found, averages) in enumerate(gloo.run(_fit, None, **options, every=every, world_size=world_size)):
        assert found == pytest.approx(seen, abs=1e-5)
        assert rank or training.max_difference(averages, weights) < 1e-5


@pytest.mark.parametrize("whole", [False, True], ids=["shards", "file"])
def test_a_run_goes_on_with_its_averages_on_other_ranks(gloo: ProcessPool, tmp_path: Path, whole: bool) -> None:
    seen, weights = _expected(gloo)
    options: dict[str, Any] = {"save_distributed_checkpoint": not whole}
    first = gloo.run(_fit, str(tmp_path), epochs=2, **options, world_size=4)[0][0]
    other = {"sharding": "zero2"} if whole else {}
    found, averages = gloo.run(_fit, str(tmp_path), resume="same", **options, **other, world_size=2)[0]
    assert [*first, *found] == pytest.approx(seen, abs=1e-5)
    assert training.max_difference(averages, weights) < 1e-5
    match = "'average_state_dict' in .* does not fit(.|\n)*1 missing in the checkpoint: more"
    options |= {"resume": "more", "exception": RuntimeError, "world_size": 2}
    gloo.expect_error_on_all_ranks(_fit, str(tmp_path), match=match, **options)


def _fit_again(directory: str) -> float:
    """How far the average is from the weights when a fit begins behind an evaluation of a checkpoint."""
    pl, found = training.load(), list[float]()
    callback = make("EMAWeights", "lightning.pytorch")(_DECAY)

    def note(_: Any, module: Any) -> None:
        weights = dict(module.named_parameters())
        found.append(max(float((average - weights[n]).abs().max()) for n, average in callback.averages.items()))

    fitter = _trainer([callback, pl.callbacks.LambdaCallback(on_train_start=note)], max_epochs=1)
    model = training.language_model(pl)
    fitter.validate(model, training.loader(), ckpt_path=f"{directory}/saved.ckpt")
    fitter.fit(model, training.loader())
    return found[0]


def test_a_fit_behind_an_evaluation_begins_anew(gloo: ProcessPool, tmp_path: Path) -> None:
    gloo.run(_fit, str(tmp_path), epochs=1, world_size=2)
    assert gloo.run(_fit_again, str(tmp_path), world_size=2) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"pipeline_size": 2}, "EMAWeights does not go with pipeline_size=2"),
        ({"optimizer": FlexDeMoConfig(replicator=DiLoCo(period=2))}, "EMAWeights does not go with DiLoCo"),
        ({"sharding": "zero2"}, "sharding='zero2' and precision='bf16-true', which round"),
        ("ddp", "with DDPStrategy; use EMAWeightAveraging"),
    ],
    ids=["pipeline", "diloco", "zero2", "ddp"],
)
def test_what_it_cannot_average_is_refused(options: Any, match: str) -> None:
    import lightning.pytorch as pl

    strategy = options if isinstance(options, str) else make("ParallelMuonStrategy", "lightning.pytorch")(**options)
    off = dict.fromkeys(("logger", "enable_checkpointing"), False)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, precision="bf16-true", **off)
    with pytest.raises(ValueError, match=match):
        make("EMAWeights", "lightning.pytorch")().setup(trainer, None, "fit")
