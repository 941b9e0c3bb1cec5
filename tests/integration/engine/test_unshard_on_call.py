"""Children of the model called from hooks and after the training, where no step has gathered the root."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.sharding.fsdp_runtime import free_unsharded
from tests.integration.training import PACKAGES, VOCABULARY, language_model, load, loader, trainer
from tests.support.processes import ProcessPool


def _call_children(package: str) -> tuple[list[float], bool]:
    """Call the network from two hooks and after ``fit``; compare with the module's own ``forward``."""
    pl = load(package)
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
    for differences, is_sharded in gloo.run(_call_children, PACKAGES[0], world_size=2):
        assert len(differences) > 5
        assert max(differences) == 0.0
        assert is_sharded


def _generate_after_fit() -> list[int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    pl = load(PACKAGES[0])

    class Language(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=16)
            self.net = GPT2LMHeadModel(config)
            self.sampled: list[int] = []

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.net(input_ids=batch[0], labels=batch[0]).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_epoch_end(self) -> None:
            self.sampled.append(self.sample())

        def sample(self) -> int:
            prompt = torch.tensor([[1, 2, 3 + dist.get_rank()]])
            return self.net.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1]

    model = Language()
    trainer(pl).fit(model, loader())
    return [*model.sampled, model.sample()]


def test_generate_works_from_a_hook_and_after_the_training(gloo: ProcessPool) -> None:
    for lengths in gloo.run(_generate_after_fit, world_size=2):
        assert len(lengths) > 1
        assert set(lengths) == {6}
