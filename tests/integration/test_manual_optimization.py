"""Manual optimization: several optimizers, several backward passes in one step."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
            self.losses: list[tuple[float, float]] = []

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
            losses = self.trainer.strategy.reduce(torch.stack([d_loss.detach(), g_loss.detach()]))
            self.losses.append(tuple(losses.tolist()))

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


def _train_gan(*, nodes: int = 0, **options: Any) -> tuple[list[Any], dict[str, Any], list[str], float]:
    pl = training.load()
    model = _gan(pl, **options)
    start = model.generator[2].weight.detach().clone()
    chosen = {"optimizer": _NODES, "replicate_size": nodes} if nodes else {"optimizer": training.EXACT}
    fitter = training.trainer(pl, strategy=training.strategy_class()(**chosen))
    fitter.fit(model, training.loader())
    weights = training.full_weights(model)
    moved = (weights["generator.2.weight"] - start).abs().max().item() if weights else 0.0
    return model.losses, weights, [type(optimizer).__name__ for optimizer in fitter.optimizers], moved


def _plain_gan(*, nodes: int = 0, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    pl = training.load()
    model = _gan(pl, **options)

    def configure(self: Any) -> Any:
        kwargs = {"lr": 2e-2, "weight_decay": 0.0, "betas": (0.5, 0.9), "compute_dtype": "float32"}
        kwargs["muon_lr_factor"] = MEASURED_MUON_LR_FACTOR
        optimizers = [ParallelMuon(part, **kwargs) for part in self.parts()]
        for optimizer in optimizers:
            optimizer.attach(self)  # As the strategy does: the whole module decides what is an output head.
        return optimizers

    if not nodes:
        type(model).configure_optimizers = configure
    # The sampler of the strategy, which shuffles.
    training.trainer(pl, strategy="ddp_find_unused_parameters_true").fit(model, training.loader())
    return model.losses, dict(model.state_dict())


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
    losses, weights, kinds, moved = gloo.run(_train_gan, world_size=world_size, **options)[0]
    plain = gloo.run(_plain_gan, world_size=1, **options)[0]
    assert kinds == 2 * ["FlexDeMo" if "nodes" in options else "ParallelMuon"]
    assert moved > 1e-2
    assert [x for pair in losses for x in pair] == pytest.approx([x for pair in plain[0] for x in pair], abs=2e-4)
    assert training.max_difference(weights, plain[1]) < 2e-4


def _forces(sharding: str) -> None:
    pl = training.load()
    model = training.language_model(pl)

    def training_step(self: Any, _: Any, batch_idx: int) -> Tensor:
        positions = torch.ones(2, 16, requires_grad=True)
        energy = self.network.blocks[1](self.network.blocks[0](positions)).sum()
        loss = torch.autograd.grad(energy, positions, create_graph=True)[0].square().mean()
        self.log("loss", loss)
        return loss

    type(model).training_step = training_step
    training.trainer(pl, strategy=training.strategy_class()(sharding=sharding)).fit(model, training.loader())


def test_a_loss_of_gradients_trains_or_is_an_error(gloo: ProcessPool) -> None:
    gloo.run(_forces, "zero2", world_size=2)
    match = r"create_graph=True .* reaches 'network.blocks.1' \(Block\).*; use sharding='zero2' or 'ddp'"
    gloo.expect_error_on_all_ranks(_forces, "fsdp", world_size=2, exception=RuntimeError, match=match)
