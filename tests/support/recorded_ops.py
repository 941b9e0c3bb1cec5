"""Compares the ops that real steps run with the program that was checked."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightning_muon.optim.matrix_step import AgreedGradients, MatrixStep
from lightning_muon.optim.parameters import States
from lightning_muon.schedule.program import Op, OpKind


class RecordedOps:
    """Names of the ops that were run since the last :meth:`check`, and those of the programs that were to be run."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.expected: list[str] = []

    def started(self, op: Op) -> None:
        if op.kind != "nodes":  # FlexDeMo's exchange, before the program.
            self.names.append(op.name)

    def ended(self, op: Op) -> None:
        pass

    def check(self) -> list[str]:
        """Assert that what was run is the program, op by op, but for buckets without gradients; what was run."""
        (ran, expected), self.names, self.expected = (self.names, self.expected), [], []
        assert ran == expected
        return ran


@contextmanager
def recorded_ops() -> Iterator[RecordedOps]:
    """Inside, every optimizer that makes a plan is recorded; call :meth:`RecordedOps.check` after each step."""
    recorded, make, run = RecordedOps(), MatrixStep.__init__, MatrixStep.run

    def make_recorded(self: MatrixStep, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.executor.recorder = recorded

    def run_recorded(self: MatrixStep, agreed: AgreedGradients, states: States) -> None:
        skipped = {
            key for key, bucket in self.plan.buckets.items() if agreed.gradients.keys().isdisjoint(bucket.tensors)
        }
        recorded.expected += [op.name for op in self.plan.ops if op.kind == OpKind.ADAMW or op.key not in skipped]
        run(self, agreed, states)

    with mock.patch.object(MatrixStep, "__init__", make_recorded), mock.patch.object(MatrixStep, "run", run_recorded):
        yield recorded
