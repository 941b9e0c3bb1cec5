"""Second moments of NorMuon while an optimizer trains: each on the ranks that orthogonalize its matrix.

The optimizer's state has them laid out like the neurons, as a checkpoint saves them. A plan takes them from there, and
writes them back before a state is saved and before the next plan is made, whose owners may be others.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.comm.collectives import start_all_reduce_sum
from lightning_muon.optim.parameters import SECOND_MOMENT, States, part_of
from lightning_muon.optim.step_plan import MatrixJob, StepPlan
from lightning_muon.params.layout import PlacedState
from lightning_muon.params.logical import neuron_shape


class SecondMoments:
    """Second moments of the neurons of the matrices that the calling rank owns: float32, (neurons,)."""

    def __init__(self, plan: StepPlan, states: States) -> None:
        """Take them from the states. Collective over the meshes of the plan."""
        self.are_outdated = False  # Whether the states were loaded since, so that the next step makes a new plan.
        self._groups = [
            (group.axes, {job: owners for job, owners in group.owners.items() if job.parameter.group["normuon"]})
            for group in plan.exchange_groups
        ]
        self._shapes: dict[Tensor, tuple[int, ...]] = {
            job.parameter.tensor: neuron_shape(tuple(job.parameter.tensor.shape), job.parameter.route)
            for _, owners in self._groups
            for job in owners
        }
        whole = self._gathered(plan, states)
        self._of_job: dict[MatrixJob, Tensor] = {}
        for axes, owners in self._groups:
            for job in (job for job, ranks in owners.items() if axes.rank in ranks):
                values = whole[job.parameter.tensor][job.matrix.neuron_box.slices].reshape(-1)
                # A process alone updates its state itself.
                self._of_job[job] = values if axes.group is None else values.clone()

    def outdate(self) -> None:
        """Note that the states were loaded; local."""
        self.are_outdated = bool(self._shapes)

    def get(self, job: MatrixJob) -> Tensor | None:
        """Those of a matrix that this rank owns, to be changed in place; ``None`` without NorMuon."""
        return self._of_job.get(job)

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
        for axes, owners in self._groups:
            if not owners:
                continue
            device = next(iter(owners)).parameter.tensor.device
            sizes = [job.matrix.num_neurons for job in owners]
            values = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
            parts = dict(zip(owners, torch.split(values, sizes), strict=True))
            for job, ranks in owners.items():
                if ranks[0] == axes.rank:
                    parts[job].copy_(self._of_job[job])
            if axes.group is not None:
                start_all_reduce_sum(values, axes).wait()
            for job, part in parts.items():
                box = job.matrix.neuron_box
                whole[job.parameter.tensor][box.slices] = part.view(box.shape)
        for tensor, values in whole.items():
            if SECOND_MOMENT in states.get(tensor, ()) and tensor not in newer and not self.are_outdated:
                state: Tensor = states[tensor][SECOND_MOMENT]
                if isinstance(state, DTensor):
                    state.to_local().copy_(part_of(values, state))
                elif state.numel():  # With zero2 it is on one rank of the shard axis.
                    state.copy_(values)
