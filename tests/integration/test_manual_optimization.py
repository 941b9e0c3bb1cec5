"""Manual optimization: several optimizers, several backward passes in one step."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_muon import FlexDeMoConfig, Full, ParallelMuon
from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from tests.integration import training
from tests.support.processes import ProcessPool


def _network(inputs: int, width: int, outputs: int, activation: type[nn.Module]) -> nn.Sequential:
    layers = (nn.Linear(inputs, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, outputs))
    return nn.Sequential(*layers)


def _gan(pl: Any, *, toggle: bool = True, accumulate: bool = False, shared: bool = False) -> Any:
    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            self.generator = _network(4, 16 if shared else 24, 6, nn.Tanh)
            self.discriminator = _network(6, 16, 1, nn.ReLU)
            self.log_temperature, self.scale = nn.Parameter(torch.zeros(())), nn.Parameter(torch.ones(6))
            if shared:
                self.first = self.generator[0]  # Held twice.
                self.discriminator[2].weight = self.generator[2].weight
            else:
                self.log_temperature.requires_grad_(False)
                self.scale.requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            real = F.one_hot(batch[0] % 5, 6).float()[:, :, :].mean(1)
            noise = torch.stack([real[:, 0], real[:, 1] - 1, batch[0].float().mean(1) / 9, real[:, 2]], 1)
            generator, discriminator = self.optimizers()
            synchronize = not accumulate or batch_idx % 2 == 1
            with discriminator.toggle_model(sync_grad=synchronize) if toggle else nullcontext():
                fake = self.generator(noise).detach() * self.scale
                d_loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
                self.manual_backward(d_loss)
                if synchronize:
                    discriminator.step()
                    discriminator.zero_grad()
            with generator.toggle_model(sync_grad=synchronize) if toggle else nullcontext():
                fake = self.generator(noise) * self.scale / self.log_temperature.exp()
                g_loss = F.softplus(-self.discriminator(fake)).mean()
                self.manual_backward(g_loss)
                if synchronize:
                    generator.step()
                    generator.zero_grad()
            if not toggle:
                discriminator.zero_grad()

        def configure_optimizers(self) -> Any:
            kwargs = {"lr": 2e-2, "weight_decay": 0.0, "betas": (0.5, 0.9)}
            return [torch.optim.AdamW(parameters, **kwargs) for parameters in self.parts()]

        def parts(self) -> list[list[nn.Parameter]]:
            generator, discriminator = list(self.generator.parameters()), list(self.discriminator.parameters())
            first = [*generator, self.log_temperature, self.scale] if shared else generator
            return [first, [p for p in discriminator if all(p is not other for other in generator)]]

    return Gan()


# All of each momentum travels, so that nodes compute what one process would.
_NODES = FlexDeMoConfig(
    base="adamw", replicator=Full(), value_format="fp32", decay=0.0, merge="mean", check_every=1, dense_below=0
)


def _by_hand(module: Any) -> list[ParallelMuon]:
    kwargs = {"lr": 2e-2, "weight_decay": 0.0, "betas": (0.5, 0.9), "compute_dtype": "float32"}
    optimizers = [ParallelMuon(part, muon_lr_factor=MEASURED_MUON_LR_FACTOR, **kwargs) for part in module.parts()]
    for optimizer in optimizers:
        optimizer.attach(module)  # As the strategy does: the whole module decides what is an output head.
    return optimizers


def _train_gan(*, plain: bool = False, nodes: int = 0, **options: Any) -> tuple[dict[str, Any], list[str], float]:
    """Weights, the optimizers, and how far a weight has moved; with a strategy of Lightning if it is ``plain``."""
    pl = training.load()
    model = _gan(pl, **options)
    if plain and not nodes:
        type(model).configure_optimizers = _by_hand
    start = model.generator[2].weight.detach().clone()
    chosen = {"optimizer": _NODES, "replicate_size": nodes} if nodes else {"optimizer": training.EXACT}
    # Both samplers shuffle.
    strategy = "ddp_find_unused_parameters_true" if plain else training.strategy_class()(**chosen)
    fitter = training.trainer(pl, strategy=strategy)
    fitter.fit(model, training.loader())
    weights = training.full_weights(model)
    moved = (weights["generator.2.weight"] - start).abs().max().item() if weights else 0.0
    return weights, [type(optimizer).__name__ for optimizer in fitter.optimizers], moved


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (4, {"shared": True}),
        (2, {"toggle": False}),
        (2, {"accumulate": True, "shared": True}),
        (2, {"nodes": 2}),
        (4, {"nodes": 2, "toggle": False}),
    ],
)
def test_a_gan_trains_as_without_the_strategy(gloo: ProcessPool, world_size: int, options: dict[str, Any]) -> None:
    weights, kinds, moved = gloo.run(_train_gan, world_size=world_size, **options)[0]
    plain, *_ = gloo.run(_train_gan, plain=True, world_size=1, **options)[0]
    assert kinds == 2 * ["FlexDeMo" if "nodes" in options else "ParallelMuon"]
    assert moved > 1e-2
    assert training.max_difference(weights, plain) < 2e-4
