"""Gradients in a Trainer: their norm is logged, and steps are skipped when they are not finite."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_muon import NonFiniteGradientError, ParallelMuon
from lightning_muon.params.layout import local_tensor
from tests.integration import training
from tests.support.processes import ProcessPool
from tests.support.tensors import are_equal


def _norms(sharding: str) -> list[float]:
    """What was logged after each step."""
    pl = training.load()
    model = training.language_model(pl)
    logged: list[float] = []
    type(model).on_train_batch_end = lambda self, *_: logged.append(float(self.trainer.callback_metrics["grad_norm"]))
    strategy = training.strategy_class()(sharding=sharding, optimizer=training.EXACT)
    training.trainer(pl, strategy=strategy, max_epochs=1, gradient_clip_val=0.2).fit(model, training.loader())
    return logged


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
def test_the_norm_before_clipping_is_logged(gloo: ProcessPool, sharding: str) -> None:
    (alone,) = gloo.run(_norms, "none", world_size=1)
    for logged in gloo.run(_norms, sharding, world_size=2):
        assert logged == pytest.approx(alone, rel=1e-5)
    assert alone[-1] > 0.2


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
    del type(model).on_train_batch_end
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
