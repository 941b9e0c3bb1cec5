"""Children of the model called from hooks and after the training, where no step has gathered the root."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_muon.compat.torch import free_unsharded
from tests.integration.training import VOCABULARY, language_model, load, loader, trainer
from tests.support.processes import ProcessPool


def _call_children() -> tuple[list[float], bool]:
    """Call the network from two hooks and after ``fit``; compare with the module's own ``forward``."""
    pl = load()
    differences: list[float] = []
    tokens = torch.arange(12).view(2, 6) % VOCABULARY

    class Sampling(pl.Callback):
        def compare(self, module: Any) -> None:
            with torch.no_grad():
                differences.append(float((module.network(tokens) - module(tokens)).abs().max()))

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.compare(module)

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            self.compare(module)

    model = language_model(pl)
    fitter = trainer(pl, callbacks=[Sampling()])
    fitter.fit(model, loader(), loader())
    Sampling().compare(model)
    free_unsharded(model)  # FSDP2 keeps the root whole after the module's own forward.
    with torch.no_grad():
        model.network(tokens)
    return differences, all(isinstance(p, DTensor) for p in model.parameters())


def test_a_child_called_from_a_hook_gives_what_the_model_gives(gloo: ProcessPool) -> None:
    for differences, is_sharded in gloo.run(_call_children, world_size=2):
        assert len(differences) > 5
        assert max(differences) == 0.0
        assert is_sharded
