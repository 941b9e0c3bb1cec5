"""LightningModules under FlexDeMo that do more than most: several optimizers, weights that start on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_muon.flexdemo.config import ExchangeOverlap, FlexDeMoConfig
from lightning_muon.flexdemo.replicators import DCTTopK, Full
from tests.integration.training import (
    PACKAGES,
    Network,
    full_weights,
    language_model,
    load,
    loader,
    max_difference,
    plain_loader,
    strategy_class,
    trainer,
)
from tests.support.processes import ProcessPool


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 4))
        self.critic = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 1))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(child.parameters(), lr=1e-2) for child in (self.generator, self.critic)]

    def generator_loss(self, tokens: Tensor) -> Tensor:
        fake = self.generator(tokens.float() / 20)
        return (fake - tokens[:, :4] / 9).square().mean() - self.critic(fake).mean()

    def critic_loss(self, tokens: Tensor) -> Tensor:
        real, fake = tokens[:, :4] / 9, self.generator(tokens.float() / 20).detach()
        return self.critic(fake).mean() - self.critic(real).mean() + self.critic(real).square().mean()


def _gan(package: str, overlap: ExchangeOverlap, toggle: bool) -> dict[str, Tensor]:
    pl = load(package)

    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.automatic_optimization = False
            pair = _Pair()
            self.generator, self.critic = pair.generator, pair.critic

        def configure_optimizers(self) -> Any:
            return _Pair.optimizers(self), []  # type: ignore[arg-type]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, loss in zip(self.optimizers(), (_Pair.generator_loss, _Pair.critic_loss), strict=True):
                if toggle:
                    self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(loss(self, batch[0]))  # type: ignore[arg-type]
                optimizer.step()
                if toggle:
                    self.untoggle_optimizer(optimizer)

    # All of each momentum travels, so the nodes compute what one process would.
    config = FlexDeMoConfig(
        base="adamw", replicator=Full(), decay=0.0, merge="mean", value_format="fp32", check_every=1, overlap=overlap,
        dense_below=0,
    )  # fmt: skip
    model = Gan()
    chosen = strategy_class(package)(replicate_size=2, optimizer=config)
    trainer(pl, strategy=chosen).fit(model, loader())
    return full_weights(model)


def _plain_gan() -> dict[str, Tensor]:
    torch.manual_seed(0)
    pair = _Pair()
    optimizers = pair.optimizers()
    for epoch in range(2):
        for tokens, _ in plain_loader(epoch):
            for optimizer, loss in zip(optimizers, (pair.generator_loss, pair.critic_loss), strict=True):
                optimizer.zero_grad()
                loss(tokens).backward()
                optimizer.step()
    return {name: parameter.detach() for name, parameter in pair.named_parameters()}


@pytest.mark.parametrize(("overlap", "toggle", "world_size"), [("backward", True, 2), ("step", False, 4)])
def test_each_of_several_optimizers_exchanges_its_own(
    gloo: ProcessPool, overlap: ExchangeOverlap, toggle: bool, world_size: int
) -> None:
    weights = gloo.run(_gan, PACKAGES[0], overlap, toggle, world_size=world_size)[0]
    # The same numbers are added up in another order, and AdamW divides by them.
    assert max_difference(weights, _plain_gan()) < 1e-4


def _from_meta(package: str) -> dict[str, Tensor]:
    pl = load(package)
    model = language_model(pl, configure=None, network=nn.Identity)

    def configure_model(self: Any) -> None:
        if isinstance(self.network, nn.Identity):
            with torch.device("meta"):
                self.network = Network()

    type(model).configure_model = configure_model
    torch.manual_seed(7 * dist.get_rank() + 1)
    config = FlexDeMoConfig(replicator=DCTTopK(chunk_size=8, top_k=4), dense_below=100, check_every=1)
    chosen = strategy_class(package)(replicate_size=2, optimizer=config)
    trainer(pl, strategy=chosen, max_epochs=1).fit(model, loader())
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def test_nodes_start_equal_from_the_meta_device(gloo: ProcessPool) -> None:
    first, *others = gloo.run(_from_meta, PACKAGES[0], world_size=4)
    assert all(tensor.isfinite().all() and tensor.any() for tensor in first.values())
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
