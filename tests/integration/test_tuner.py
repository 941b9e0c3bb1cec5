"""Lightning's learning-rate finder, which saves, trains and restores inside of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.training import PACKAGES, language_model, load, loader, trainer
from tests.support.processes import ProcessPool


def _find(package: str, directory: str) -> tuple[float, float, int]:
    pl = load(package)
    model = language_model(pl, configure=lambda module: torch.optim.AdamW(module.parameters(), lr=module.lr))
    model.lr = 1e-3
    fitter = trainer(pl, max_epochs=1, default_root_dir=directory)
    finder: Any = pl.tuner.Tuner(fitter).lr_find(model, loader(num_samples=240), num_training=20)
    fitter.fit(model, loader(num_samples=240))
    return finder.suggestion(), fitter.optimizers[0].param_groups[0]["lr"], fitter.global_step


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_rate_that_was_found_is_used_from_the_first_step(
    gloo: ProcessPool, tmp_path: Path, world_size: int
) -> None:
    outcomes = gloo.run(_find, PACKAGES[0], str(tmp_path), world_size=world_size)
    assert len(set(outcomes)) == 1
    suggestion, used, steps = outcomes[0]
    assert used == suggestion
    assert suggestion != 1e-3
    assert steps == 30
