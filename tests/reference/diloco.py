"""DiLoCo of R nodes in one process and float64: whole inner optimizers, an outer SGD, to compare FlexDeMo with.

Written from the papers (arXiv:2311.08105, Algorithm 1; with Muon inside arXiv:2505.23725), not from the package.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from tests.reference.muon_and_adamw import MuonAndOther


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Options of the run. Inner optimizers take their names from ``matrices``: what Muon takes of ``base="muon"``."""

    num_nodes: int
    period: int
    outer_lr: float
    outer_momentum: float
    nesterov: bool
    base: Literal["sgd", "adamw", "muon"] = "sgd"
    lr: float = 0.01
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)  # Of AdamW.
    eps: float = 1e-8
    momentum: float = 0.95
    inner_nesterov: bool = True
    matrices: Sequence[str] = ()


class ReferenceDiLoCo:
    """Weights of each node, which begin equal, and those of the last average."""

    def __init__(self, weights: Mapping[str, Tensor], rules: Rules) -> None:
        self.period = rules.period
        self.common = {name: weight.double().clone() for name, weight in weights.items()}
        self.nodes = [{name: w.clone() for name, w in self.common.items()} for _ in range(rules.num_nodes)]
        shared = {"lr": rules.lr, "weight_decay": rules.weight_decay}
        make = partial(torch.optim.SGD, **shared)
        if rules.base != "sgd":
            make = partial(torch.optim.AdamW, betas=rules.betas, eps=rules.eps, **shared)
        own = {"momentum": rules.momentum, "nesterov": rules.inner_nesterov, "dtype": torch.float64, **shared}
        matrices = rules.matrices if rules.base == "muon" else ()
        self._inner = [MuonAndOther(node, matrices, make, **own) for node in self.nodes]
        self._outer = torch.optim.SGD(
            self.common.values(), lr=rules.outer_lr, momentum=rules.outer_momentum, nesterov=rules.nesterov
        )
        self.num_steps = 0

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        """One step with the gradients of each node; a gradient that only some nodes have is zero on the others."""
        names = {name for of_node in gradients for name in of_node}
        for inner, of_node, weights in zip(self._inner, gradients, self.nodes, strict=True):
            inner.step({name: of_node.get(name, torch.zeros_like(weights[name])).double() for name in names})
        self.num_steps += 1
        if self.num_steps % self.period == 0:
            self._average()

    def _average(self) -> None:
        for name, weight in self.common.items():
            weight.grad = torch.stack([weight - node[name] for node in self.nodes]).mean(0)
        self._outer.step()
        for node in self.nodes:
            for name, weight in node.items():
                weight.copy_(self.common[name])
