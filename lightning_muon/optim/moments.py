"""NorMuon: orthogonalized updates whose rows have equal lengths on average over the steps.

While an optimizer trains, each second moment is on the ranks that orthogonalize its matrix. The optimizer's state has
them laid out like the neurons, as a checkpoint saves them. A plan takes them from there, and writes them back before a
state is saved and before the next plan is made, whose owners may be others.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.comm.collectives import start_all_reduce_sum
from lightning_muon.optim.parameters import SECOND_MOMENT, States
from lightning_muon.optim.step_plan import StepPlan
from lightning_muon.params.layout import PlacedState, own_part_of
from lightning_muon.params.matrices import Matrix, neuron_shape

# Denominator term of the published implementation (github.com/zichongli5/NorMuon, normuon.py).
_EPS = 1e-10


def normalize_neurons_(update: Tensor, second_moment: Tensor, *, beta2: float) -> Tensor:
    """The NorMuon update of an orthogonalized ``update`` O (rows, cols), float32; changes ``second_moment`` v (rows,).

    ``v <- beta2 v + (1 - beta2) mean_cols(O^2)``, then ``O_i / (sqrt(v_i) + eps)`` for each row, scaled to the
    Frobenius norm ``sqrt(min(rows, cols))`` of an orthogonal matrix: times ``0.2 sqrt(max(rows, cols))``
    (``match_rms_adamw``) that is the paper's ``0.2 sqrt(rows cols) / |O|``. A zero matrix stays zero.

    Source: Li et al. 2025, arXiv:2510.05491, Algorithm 1.
    """
    whole = update.to(torch.float32)
    second_moment.lerp_(whole.square().mean(-1), 1 - beta2)
    whole = whole / (second_moment.sqrt() + _EPS).unsqueeze(-1)
    norm = whole.square().sum().sqrt() + _EPS
    return whole.mul_(math.sqrt(min(update.shape)) / norm)


class SecondMoments:
    """Second moments of the neurons of the matrices that the calling rank owns: float32, (neurons,)."""

    def __init__(self, plan: StepPlan, states: States) -> None:
        """Take them from the states. Collective over the meshes of the plan."""
        self.are_outdated = False  # Whether the states were loaded since, so that the next step makes a new plan.
        self._groups = [
            (group.axes, [matrix for matrix in group.matrices if matrix.parameter.group["normuon"]])
            for group in plan.exchange_groups
        ]
        self._shapes: dict[Tensor, tuple[int, ...]] = {
            each.parameter.tensor: neuron_shape(tuple(each.parameter.tensor.shape), each.parameter.route)
            for _, matrices in self._groups
            for each in matrices
        }
        whole = self._gathered(plan, states)
        # To be changed in place.
        self.of: dict[Matrix, Tensor] = {}
        for axes, matrices in self._groups:
            for matrix in (each for each in matrices if each.owner == axes.rank):
                values = whole[matrix.parameter.tensor][matrix.neuron_box.slices].reshape(-1)
                # A process alone updates its state itself.
                self.of[matrix] = values if axes.group is None else values.clone()

    def normalized(self, matrix: Matrix, update: Tensor, *, beta2: float) -> Tensor:
        """The NorMuon update of an owned matrix that has a moment; local."""
        if matrix.is_transposed:
            return normalize_neurons_(update.mT, self.of[matrix], beta2=beta2).mT
        return normalize_neurons_(update, self.of[matrix], beta2=beta2)

    def outdate(self) -> None:
        """Note that the states were loaded; local."""
        self.are_outdated = bool(self._shapes)

    def _gathered(self, plan: StepPlan, states: States) -> dict[Tensor, Tensor]:
        """The whole state of each parameter that has some. Collective over the meshes of the plan."""
        tensors = [tensor for members in plan.meshes for tensor in members.tensors if tensor in self._shapes]
        placed = [PlacedState(tensor, states[tensor][SECOND_MOMENT], self._shapes[tensor]) for tensor in tensors]
        saved = plan.layout.saved(placed) if placed else []
        return {
            tensor: each.full_tensor() if isinstance(each, DTensor) else each
            for tensor, each in zip(tensors, saved, strict=True)
        }

    def write(self, states: States, newer: Collection[Tensor]) -> None:
        """Write them to the states of all ranks, except those of ``newer``, which were made since.

        Collective over the axes of each exchange group that has some.
        """
        whole = {
            tensor: torch.zeros(shape, dtype=torch.float32, device=tensor.device)
            for tensor, shape in self._shapes.items()
        }
        for axes, matrices in (each for each in self._groups if each[1]):
            sizes = [matrix.num_neurons for matrix in matrices]
            values = torch.zeros(sum(sizes), dtype=torch.float32, device=matrices[0].parameter.tensor.device)
            parts = dict(zip(matrices, torch.split(values, sizes), strict=True))
            for matrix, part in parts.items():
                if matrix.owner == axes.rank:
                    part.copy_(self.of[matrix])
            if axes.group is not None:
                start_all_reduce_sum(values, axes).wait()
            for matrix, part in parts.items():
                box = matrix.neuron_box
                whole[matrix.parameter.tensor][box.slices] = part.view(box.shape)
        for tensor, values in whole.items():
            if SECOND_MOMENT in states.get(tensor, ()) and tensor not in newer and not self.are_outdated:
                state: Tensor = states[tensor][SECOND_MOMENT]
                if isinstance(state, DTensor):
                    state.to_local().copy_(own_part_of(values, state))
                elif state.numel():  # With zero2 it is on one rank of the shard axis.
                    state.copy_(values)
