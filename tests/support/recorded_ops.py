"""Compares the ops that real steps run with the program that was checked."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from lightning_muon.optim.matrix_step import MatrixStep
from lightning_muon.optim.step_plan import StepPlan
from lightning_muon.schedule.program import Facts, Op, runs


class RecordedOps:
    """Names of the ops that were run since the last :meth:`check`, and the walks through programs that ran them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.walks: list[tuple[StepPlan, Facts, bool]] = []

    def started(self, op: Op) -> None:
        if op.kind != "nodes":  # FlexDeMo's exchange, before the program.
            self.names.append(op.name)

    def ended(self, op: Op) -> None:
        pass

    def check(self) -> list[str]:
        """Assert that what was run is the program, op by op, in the branches that its step has taken; what was run."""
        ran, self.names = self.names, []
        walks, self.walks = self.walks, []
        if not walks:  # The step was given up before its program began.
            return ran
        expected: list[str] = []
        for plan, facts, was_given_up in walks:
            names = [op.name for op in plan.ops if runs(op, facts)]
            expected += names[: names.index("check[]") + 1] if was_given_up else names
        assert ran == expected
        return ran


@contextmanager
def recorded_ops() -> Iterator[RecordedOps]:
    """Inside, every optimizer that makes a plan is recorded; call :meth:`RecordedOps.check` after each step."""
    recorded, make, run = RecordedOps(), MatrixStep.__init__, MatrixStep.run

    def make_recorded(self: MatrixStep, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self.executor.recorder = recorded
        recorded.names.clear()  # What an older plan has sent during backward is dropped.

    def run_recorded(self: MatrixStep, *arguments: Any) -> None:
        is_done = False
        try:
            run(self, *arguments)
            is_done = True
        finally:
            recorded.walks.append((self.plan, self.facts, not is_done))

    with mock.patch.object(MatrixStep, "__init__", make_recorded), mock.patch.object(MatrixStep, "run", run_recorded):
        yield recorded
