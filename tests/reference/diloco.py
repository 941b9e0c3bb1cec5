"""DiLoCo of R nodes in one process and float64: whole inner optimizers, an outer SGD, to compare FlexDeMo with.

Written from the papers (arXiv:2311.08105, Algorithm 1; with Muon inside arXiv:2505.23725), not from the package.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tests.reference.muon import ReferenceMuon

Weights = dict[str, Tensor]


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
        self.rules = rules
        self.common = {name: weight.double().clone() for name, weight in weights.items()}
        self.nodes = [{name: w.clone() for name, w in self.common.items()} for _ in range(rules.num_nodes)]
        self._inner = [_inner(node, rules) for node in self.nodes]
        self._momentum = {name: torch.zeros_like(weight) for name, weight in self.common.items()}
        self.num_steps = 0

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> None:
        """One step with the gradients of each node; a gradient that only some nodes have is zero on the others."""
        names = {name for of_node in gradients for name in of_node}
        for inner, of_node, weights in zip(self._inner, gradients, self.nodes, strict=True):
            inner({name: of_node.get(name, torch.zeros_like(weights[name])).double() for name in names})
        self.num_steps += 1
        if self.num_steps % self.rules.period == 0:
            self._average()

    def _average(self) -> None:
        self.common = {name: self._outer(name, [node[name] for node in self.nodes]) for name in self.common}
        for node in self.nodes:
            for name, weight in node.items():
                weight.copy_(self.common[name])

    def _outer(self, name: str, of_nodes: Sequence[Tensor]) -> Tensor:
        rules, weight = self.rules, self.common[name]
        drift = torch.stack([weight - of_node for of_node in of_nodes]).mean(0)
        self._momentum[name] = rules.outer_momentum * self._momentum[name] + drift
        ahead = drift + rules.outer_momentum * self._momentum[name] if rules.nesterov else self._momentum[name]
        return weight - rules.outer_lr * ahead


def _inner(weights: Weights, rules: Rules) -> Callable[[Mapping[str, Tensor]], None]:
    """A step of one node, which changes ``weights`` in place and keeps its state over averages."""
    matrices = {name: weights[name] for name in rules.matrices} if rules.base == "muon" else {}
    rest = {name: weight for name, weight in weights.items() if name not in matrices}
    muon = ReferenceMuon(
        matrices, lr=rules.lr, weight_decay=rules.weight_decay, momentum=rules.momentum,
        nesterov=rules.inner_nesterov, dtype=torch.float64,
    )  # fmt: skip
    shared = {"lr": rules.lr, "weight_decay": rules.weight_decay}
    others = {
        name: torch.optim.SGD([weight], **shared)
        if rules.base == "sgd"
        else torch.optim.AdamW([weight], betas=rules.betas, eps=rules.eps, **shared)
        for name, weight in rest.items()
    }

    def step(gradients: Mapping[str, Tensor]) -> None:
        for name, weight in matrices.items():
            muon.matrices[name].copy_(weight)
        muon.step({name: gradients[name] for name in matrices if name in gradients})
        for name, weight in matrices.items():
            weight.copy_(muon.matrices[name])
        for name, weight in rest.items():
            if name in gradients:
                weight.grad = gradients[name]
                others[name].step()

    return step
