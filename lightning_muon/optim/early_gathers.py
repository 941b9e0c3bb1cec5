"""Gathers of matrices to their owners that start while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon.optim.early import SentEarly
from lightning_muon.optim.matrix_step import Chunk, Gradients, MatrixStep, States
from lightning_muon.schedule.kinds import MOMENTUM


class EarlyGathers(SentEarly):
    """Those of some chunks of one plan whose parameters are DTensors.

    Each chunk that is sent is a communication over the private group of its exchange group.

    Args:
        step: Runs the ops.
        states: Of the optimizer, which may be replaced at any time.
        is_valid: Whether the hyper-parameters are such that a step can be taken.
        chunks: Chunks that are gathered, in the order in which backward finishes them.
    """

    def __init__(
        self,
        step: MatrixStep,
        states: Callable[[], States],
        is_valid: Callable[[], bool],
        chunks: Sequence[Chunk],
    ) -> None:
        chunks = [chunk for chunk in chunks if all(isinstance(tensor, DTensor) for tensor in chunk.tensors)]
        leaders = {chunk.key: chunk.group.jobs[chunk.taken[0]].matrix.name for chunk in chunks}
        super().__init__({chunk.key: chunk.tensors for chunk in chunks}, leaders)
        self._step, self._states, self._is_valid = step, states, is_valid

    def _is_ready(self, key: str) -> bool:
        states = self._states()
        return self._is_valid() and all("momentum_buffer" in states.get(tensor, ()) for tensor in self._chunks[key])

    def _start(self, key: str, gradients: Gradients) -> None:
        # What is sent without being ready, because other ranks have sent it, is of no use: there will be a new plan.
        self._step.start_early(key, gradients, self._states(), packs=self._is_ready(key))

    def _wait_until_read(self, key: str) -> None:
        self._step.executor.wait(f"{MOMENTUM}[{key}]")

    def _drop(self, key: str) -> None:
        self._step.drop_early(key)

    def _differs(self, key: str, gradients: Gradients) -> Tensor:
        return self._step.differs_from_early(key, gradients, self._states())
