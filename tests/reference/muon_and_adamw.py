"""A whole training step in one process: Muon for some weights, an optimizer of torch for the rest."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_muon.config import MEASURED_MUON_LR_FACTOR
from tests.reference.muon import ReferenceMuon


class MuonAndOther:
    """Steps whole weights in place; ``matrices`` names those on Muon, ``make`` gives the optimizer of the others."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        matrices: Collection[str],
        make: Callable[[list[Tensor]], torch.optim.Optimizer],
        **muon: Any,
    ) -> None:
        self.weights = weights
        self.muon = ReferenceMuon({name: weights[name] for name in matrices}, **muon)
        rest = [weight for name, weight in weights.items() if name not in matrices]
        self.other = make(rest or [torch.zeros(0)])

    def set_rate(self, lr: float) -> None:
        """As a scheduler does it."""
        self.muon.lr = lr
        for group in self.other.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Take a step with these gradients, or with those that the weights have."""
        if gradients is not None:
            for name, weight in self.weights.items():
                weight.grad = gradients.get(name)
        self.muon.step({name: each.grad for name, each in self.muon.matrices.items() if each.grad is not None})
        self.other.step()

    def zero_grad(self) -> None:
        for weight in self.weights.values():
            weight.grad = None


def muon_and_adamw(
    module: nn.Module,
    matrices: Collection[str],
    *,
    lr: float,
    muon_lr_factor: float = MEASURED_MUON_LR_FACTOR,
    weight_decay: float = 0.1,
    **adamw: Any,
) -> MuonAndOther:
    """For the weights of a module: by default what becomes of an AdamW."""
    make = partial(torch.optim.AdamW, lr=lr, weight_decay=weight_decay, **adamw)
    muon = {"lr": lr, "muon_lr_factor": muon_lr_factor, "weight_decay": weight_decay}
    return MuonAndOther(dict(module.named_parameters()), matrices, make, **muon)
