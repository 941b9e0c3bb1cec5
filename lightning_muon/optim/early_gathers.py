"""Gathers of matrices to their owners that start while backward still runs."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.optim.early import SentEarly
from lightning_muon.optim.matrix_step import Gradients, MatrixStep, States
from lightning_muon.schedule.kinds import MOMENTUM


class EarlyGathers(SentEarly):
    """The chunks of one plan whose parameters are DTensors.

    Each chunk that is sent is a communication over the private group of its exchange group.

    Args:
        step: Runs the ops.
        states: Of the optimizer.
    """

    def __init__(self, step: MatrixStep, states: States) -> None:
        chunks = {
            chunk.key: chunk
            for chunk in step.gathered_chunks
            if all(isinstance(tensor, DTensor) for tensor in chunk.tensors)
        }
        leaders = {key: chunk.group.jobs[chunk.taken[0]].matrix.name for key, chunk in chunks.items()}
        super().__init__({key: chunk.tensors for key, chunk in chunks.items()}, leaders)
        self._step, self._states = step, states

    def _start(self, key: str, gradients: Gradients) -> None:
        self._step.start_early(key, gradients, self._states)

    def _wait_until_read(self, key: str) -> None:
        self._step.executor.wait(f"{MOMENTUM}[{key}]")

    def _drop(self, key: str) -> None:
        self._step.drop_early(key)

    def _differs(self, key: str, gradients: Gradients) -> Tensor:
        return self._step.differs_from_early(key, gradients, self._states)
