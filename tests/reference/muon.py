"""Muon and AdamW on full tensors in one process, written for reading: what every distributed path is compared with."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(
    matrix: Tensor,
    *,
    steps: Sequence[tuple[float, float, float]] = (COEFFICIENTS,) * 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Newton-Schulz as in https://kellerjordan.github.io/posts/muon, in ``dtype``."""
    x = matrix.to(dtype)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=eps)
    for a, b, c in steps:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


# Makes an update of a matrix (outputs, inputs), by Newton-Schulz as it is given.
Orthogonalization = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


def plain(matrix: Tensor, newton_schulz: Callable[[Tensor], Tensor]) -> Tensor:
    """Newton-Schulz alone."""
    return newton_schulz(matrix)


def muon_eq(matrix: Tensor, newton_schulz: Callable[[Tensor], Tensor]) -> Tensor:
    """MuonEq: first rows of equal lengths (Chang et al. 2026, arXiv:2603.28254)."""
    x = matrix.double() / matrix.abs().max().clamp(min=1e-30)
    return newton_schulz((torch.diag(1 / ((x @ x.T).diagonal() + 1e-8).sqrt()) @ x).to(matrix.dtype))


def muon_plus(matrix: Tensor, newton_schulz: Callable[[Tensor], Tensor]) -> Tensor:
    """Muon+: then rows and after them columns of length 1 (Zhang et al. 2026, arXiv:2602.21545), and the usual norm."""
    x = newton_schulz(matrix).double()
    x = torch.diag(1 / ((x @ x.T).diagonal() + 1e-7).sqrt()) @ x
    x = x @ torch.diag(1 / ((x.T @ x).diagonal() + 1e-7).sqrt())
    return (x * math.sqrt(min(x.shape) / x.shape[1])).to(matrix.dtype)


class ReferenceMuon:
    """State and step of Muon for named full tensors, which it changes in place, all in one process."""

    def __init__(
        self,
        matrices: Mapping[str, Tensor],
        *,
        lr: float,
        muon_lr_factor: float = 1.0,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str = "match_rms_adamw",
        orthogonalization: Orthogonalization = plain,
        dtype: torch.dtype = torch.float32,
        steps: Sequence[tuple[float, float, float]] = (COEFFICIENTS,) * 5,
        normuon: bool = False,
        normuon_beta2: float = 0.95,
    ) -> None:
        self.normuon, self.normuon_beta2 = normuon, normuon_beta2
        self.second_moments: dict[str, Tensor] = {}  # By name, and number of the matrix in a stack.
        self.matrices = matrices
        self.buffers = {name: torch.zeros_like(tensor) for name, tensor in matrices.items()}
        self.lr, self.muon_lr_factor, self.weight_decay = lr, muon_lr_factor, weight_decay
        self.momentum, self.nesterov = momentum, nesterov
        self.adjust_lr_fn, self.orthogonalization = adjust_lr_fn, orthogonalization
        self.newton_schulz = partial(orthogonalized, steps=steps, dtype=dtype)

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor]) -> None:
        """Update every tensor that has a gradient. 3-D tensors are stacks, more dimensions are convolutions."""
        rate = self.lr * self.muon_lr_factor
        for name, grad in grads.items():
            self.buffers[name].lerp_(grad, 1 - self.momentum)
            ahead = grad.lerp(self.buffers[name], self.momentum) if self.nesterov else self.buffers[name]
            tensor = self.matrices[name]
            tensor.mul_(1 - rate * self.weight_decay)
            if tensor.ndim == 3:
                for number, (matrix, target) in enumerate(zip(ahead, tensor, strict=True)):
                    self._add(f"{name} {number}", target, matrix, rate)
            else:
                self._add(name, tensor, ahead.flatten(1), rate)

    def _add(self, name: str, target: Tensor, ahead: Tensor, rate: float) -> None:
        rows, cols = ahead.shape
        scale = 0.2 * math.sqrt(max(rows, cols))
        if self.adjust_lr_fn == "original":
            scale = math.sqrt(max(1, rows / cols))
        elif self.adjust_lr_fn == "spectral_mup":
            scale = math.sqrt(rows / cols)
        update = self.orthogonalization(ahead, self.newton_schulz)
        if self.normuon:
            update = self._normuon(name, update)
        target.add_(update.reshape(target.shape), alpha=-rate * scale)

    def _normuon(self, name: str, update: Tensor) -> Tensor:
        """Li et al. 2025, arXiv:2510.05491, Algorithm 1, where an update has the norm 0.2 * sqrt(rows * cols)."""
        rows, cols = update.shape
        moment = self.second_moments.setdefault(name, torch.zeros(rows))
        moment.copy_(self.normuon_beta2 * moment + (1 - self.normuon_beta2) * update.square().mean(1))
        update = update / (moment.sqrt() + 1e-10)[:, None]
        return 0.2 * math.sqrt(rows * cols) * update / update.norm() / (0.2 * math.sqrt(max(rows, cols)))
