"""A whole training step in one process: Muon for some weights of a module, torch's AdamW for the rest."""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from tests.reference.muon import ReferenceMuon


class MuonAndAdamW:
    """Steps the whole weights of a module in place; ``matrices`` names those that run on Muon.

    A converted AdamW has ``muon_lr_factor=MEASURED_MUON_LR_FACTOR``, a ParallelMuon that a program makes itself 1.
    """

    def __init__(
        self,
        module: nn.Module,
        matrices: Collection[str],
        *,
        lr: float,
        muon_lr_factor: float = 1.0,
        weight_decay: float = 0.1,
        **adamw: Any,
    ) -> None:
        self.parameters = dict(module.named_parameters())
        whole = {name: self.parameters[name].detach() for name in matrices}
        self.muon = ReferenceMuon(whole, lr=lr, muon_lr_factor=muon_lr_factor, weight_decay=weight_decay)
        rest = [parameter for name, parameter in self.parameters.items() if name not in matrices]
        self.adamw = torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay, **adamw)

    @torch.no_grad()
    def step(self) -> None:
        """Take a step with the gradients of the module."""
        self.muon.step({name: self.parameters[name].grad for name in self.muon.matrices})  # type: ignore[misc]
        for name, matrix in self.muon.matrices.items():
            self.parameters[name].copy_(matrix)
        self.adamw.step()

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
