"""Muon and AdamW on full tensors in one process, written for reading: what every distributed path is compared with."""

import math
from collections.abc import Callable, Mapping, Sequence

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


def equilibrated(matrix: Tensor, variant: str) -> Tensor:
    """MuonEq: rows ("R"), columns ("C") or both of equal lengths (Chang et al. 2026, arXiv:2603.28254)."""
    x = matrix.double() / matrix.abs().max().clamp(min=1e-30)
    row_lengths, col_lengths = ((x @ x.T).diagonal() + 1e-8).sqrt(), ((x.T @ x).diagonal() + 1e-8).sqrt()
    if "R" in variant:
        x = torch.diag(1 / row_lengths) @ x
    if "C" in variant:
        x = x @ torch.diag(1 / col_lengths)
    return x.to(matrix.dtype)


def normalized(update: Tensor, variant: str) -> Tensor:
    """Muon+: rows or columns of length 1, in the given order (Zhang et al. 2026, arXiv:2602.21545)."""
    x = update.double()
    for side in variant.split("_"):
        rows = x if side == "row" else x.T
        rows = torch.diag(1 / ((rows @ rows.T).diagonal() + 1e-7).sqrt()) @ rows
        x = rows if side == "row" else rows.T
    return x.to(update.dtype)


def in_8_bits(matrix: Tensor, num_parts: int = 1) -> Tensor:
    """What 8 bits keep of a matrix: blocks of 2048 in each row, the last one shorter, in multiples of max / 127.

    Of a matrix in parts along its rows, as ``torch.chunk`` makes them, each part has blocks of its own.
    """
    blocks: list[Tensor] = []
    for part in matrix.chunk(num_parts, dim=1):
        for block in part.split(2048, dim=1):
            maxima = block.abs().amax(1, keepdim=True)
            # In float32 and this order: near the middle between two codes another rounding gives the other one.
            codes = torch.round(block / maxima * 127).nan_to_num()
            blocks.append(codes * (1 / 127) * maxima)
    return torch.cat(blocks, dim=1)


class ReferenceMuon:
    """State and step of Muon for named full tensors, all in one process.

    ``kept`` makes of the name of a tensor and its momentum what is kept of it until the next step.
    """

    def __init__(
        self,
        matrices: Mapping[str, Tensor],
        *,
        lr: float,
        muon_lr_factor: float = 1.0,
        weight_decay: float = 0.1,
        cautious_weight_decay: bool = False,
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: str = "match_rms_adamw",
        muon_eq: str = "none",
        muon_plus: str = "none",
        dtype: torch.dtype = torch.float32,
        steps: Sequence[tuple[float, float, float]] = (COEFFICIENTS,) * 5,
        normuon: bool = False,
        normuon_beta2: float = 0.95,
        hyperball: bool = False,
        kept: Callable[[str, Tensor], Tensor] = lambda name, momentum: momentum,
    ) -> None:
        self.normuon, self.normuon_beta2, self.hyperball = normuon, normuon_beta2, hyperball
        self.second_moments: dict[str, Tensor] = {}  # By name, and number of the matrix in a stack.
        self.norms: dict[str, Tensor] = {}
        self.matrices = {name: tensor.clone() for name, tensor in matrices.items()}
        self.buffers = {name: torch.zeros_like(tensor) for name, tensor in matrices.items()}
        self.lr, self.muon_lr_factor, self.weight_decay = lr, muon_lr_factor, weight_decay
        self.cautious_weight_decay = cautious_weight_decay
        self.momentum, self.nesterov = momentum, nesterov
        self.adjust_lr_fn, self.dtype, self.steps, self.kept = adjust_lr_fn, dtype, steps, kept
        self.muon_eq, self.muon_plus = muon_eq, muon_plus

    def step(self, grads: Mapping[str, Tensor]) -> None:
        """Update every tensor that has a gradient. 3-D tensors are stacks, more dimensions are convolutions."""
        rate = self.lr * self.muon_lr_factor
        for name, grad in grads.items():
            self.buffers[name].lerp_(grad, 1 - self.momentum)
            ahead = grad.lerp(self.buffers[name], self.momentum) if self.nesterov else self.buffers[name]
            self.buffers[name] = self.kept(name, self.buffers[name])
            tensor = self.matrices[name]
            if not self.cautious_weight_decay and not self.hyperball:
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
        elif self.muon_plus != "none":  # Unit vectors of so many elements.
            scale = 0.2 * math.sqrt(cols if self.muon_plus in ("row", "col_row") else rows)
        if self.muon_eq != "none":
            ahead = equilibrated(ahead, self.muon_eq)
        update = orthogonalized(ahead, steps=self.steps, dtype=self.dtype)
        if self.muon_plus != "none":
            update = normalized(update, self.muon_plus)
        if self.normuon:
            update = self._normuon(name, update)
        if self.hyperball:  # Wen et al. 2026, arXiv:2606.16899.
            radius = self.norms.setdefault(name, target.norm())
            ahead = target - rate * radius * (update / update.norm()).reshape(target.shape)
            target.copy_(radius * ahead / ahead.norm())
            return
        if self.cautious_weight_decay:  # Chen et al. 2025, arXiv:2510.12402, Algorithm 1.
            aligned = update.reshape(target.shape) * target >= 0
            target.mul_(torch.where(aligned, 1 - rate * self.weight_decay, 1.0))
        target.add_(update.reshape(target.shape), alpha=-rate * scale)

    def _normuon(self, name: str, update: Tensor) -> Tensor:
        """Li et al. 2025, arXiv:2510.05491, Algorithm 1, where an update has the norm 0.2 * sqrt(rows * cols)."""
        rows, cols = update.shape
        moment = self.second_moments.setdefault(name, torch.zeros(rows))
        moment.copy_(self.normuon_beta2 * moment + (1 - self.normuon_beta2) * update.square().mean(1))
        update = update / (moment.sqrt() + 1e-10)[:, None]
        return 0.2 * math.sqrt(rows * cols) * update / update.norm() / (0.2 * math.sqrt(max(rows, cols)))
