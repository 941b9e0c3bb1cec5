"""Optimizers of other packages, by the names of their states and the formulas of their steps, in float32.

Written after github.com/KellerJordan/Muon (muon.py, SingleDeviceMuonWithAuxAdam) and github.com/microsoft/dion
(dion/muon.py, dion/megabatch_base.py, dion/scalar_opts.py); Newton-Schulz is the same in all.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tests.reference.muon import orthogonalized


class KellerJordanMuon(torch.optim.Optimizer):
    """Groups say ``use_muon``; momentum is an average."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if group["use_muon"]:
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    update = orthogonalized(p.grad.lerp(momentum, group["momentum"]))
                    update = update * max(1, p.size(-2) / p.size(-1)) ** 0.5
                else:
                    for key in ("exp_avg", "exp_avg_sq"):
                        state.setdefault(key, torch.zeros_like(p))
                    state["step"] = state.get("step", 0) + 1
                    update = _adam(p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"])


def _adam(gradient: Tensor, first: Tensor, second: Tensor, step: int, group: dict[str, Any]) -> Tensor:
    beta1, beta2 = group["betas"]
    first.lerp_(gradient, 1 - beta1)
    second.lerp_(gradient.square(), 1 - beta2)
    return first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + group["eps"])


class DionMuon(torch.optim.Optimizer):
    """Groups say ``algorithm``; momentum is a sum."""

    def __init__(self, groups: list[dict[str, Any]], *, adjust_lr: str) -> None:
        defaults = {"lr": 0.01, "mu": 0.95, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01, "cautious_wd": False}
        more = {"algorithm": "muon", "step": 0, "epsilon": 1e-8, "nesterov": False, "flatten": False}
        super().__init__(groups, {**defaults, **more, "adjust_lr": adjust_lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = torch.zeros_like(p)
                if group["algorithm"] == "adamw":
                    self.state[p] |= {"variance": torch.zeros_like(p), "step_dev": torch.zeros(())}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                state, rate = self.state[p], group["lr"]
                if group["algorithm"] == "muon":
                    momentum = state["momentum"].mul_(group["mu"]).add_(p.grad)
                    ahead = momentum * group["mu"] + p.grad if group["nesterov"] else momentum
                    update, (rows, cols) = orthogonalized(ahead), p.shape
                    rms = group["adjust_lr"] == "rms_norm"
                    rate *= 0.2 * math.sqrt(max(rows, cols)) if rms else math.sqrt(rows / cols)
                else:
                    state["step_dev"] += 1
                    hyper = {"betas": (group["beta1"], group["beta2"]), "eps": group["epsilon"]}
                    update = _adam(p.grad, state["momentum"], state["variance"], group["step"], hyper)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-rate)
