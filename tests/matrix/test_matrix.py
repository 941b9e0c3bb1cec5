"""Every row ends with the weights, and has the losses, of one process on the whole batches.

``HYPOTHESIS_PROFILE=long`` draws 300 further rows instead of 12. ``-k "zero2 and lightning"`` runs the rows so named.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.matrix.alone import alone
from tests.matrix.frameworks import Task, train
from tests.matrix.row import Row
from tests.matrix.rows import ROWS, draw
from tests.support.processes import ProcessPool, RanksFailedError

NUM_DRAWN = 300 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 12
ALL = ROWS | {f"drawn {seed}": draw(seed) for seed in range(NUM_DRAWN)}
# Process groups of a call stay until it ends.
MOST_IN_ONE_CALL = 25


def _train_each(rows: list[tuple[str, Row]], folder: str, *, resume: bool) -> None:
    """One training after the other, each with a file of what this rank has found; ends at the first failure."""
    for number, (name, row) in enumerate(rows):
        sys.stdout.write(f"--- {name}\n")
        directory = f"{folder}/{name}".replace(", ", "-").replace(" ", "_").replace("{", "").replace("}", "")
        if row.saved_at or "launched" in row.framework or "transformers" in row.framework:
            os.makedirs(directory, exist_ok=True)
        task = Task(range(row.saved_at if resume else 0, row.steps), directory, resume)
        torch.manual_seed(number)
        try:
            with mock.patch.dict(os.environ):
                found: Any = train(row, task)
        except ValueError as error:
            if task.has_begun or not row.may_be_refused:
                raise
            found = str(error)
        Path(folder, f"{number}.{dist.get_rank()}").write_bytes(pickle.dumps(found))


class Results:
    """What the ranks have found, by row; the rows of a number of ranks run in one call of the pool."""

    def __init__(self, gloo: ProcessPool, folder: Path, names: Iterable[str]) -> None:
        self.gloo, self.folder, self.names = gloo, folder, list(dict.fromkeys(names))
        self.found: dict[tuple[str, bool], Any] = {}

    def of(self, name: str, *, resume: bool = False) -> Any:
        """Results of all ranks, or the error of the call in which the row ran."""
        if (name, resume) not in self.found:
            rows = [(each, self._row(each, resume=resume)) for each in self.names]
            ranks = self._row(name, resume=resume).ranks
            left = [(each, row) for each, row in rows if row.ranks == ranks and (not resume or row.saved_at)]
            for each, _ in left if resume else ():
                self.of(each)
            while left:
                left = left[self._run(left[:MOST_IN_ONE_CALL], ranks, resume=resume) :]
        return self.found[name, resume]

    def _row(self, name: str, *, resume: bool) -> Row:
        return replace(ALL[name], **ALL[name].resumed) if resume else ALL[name]

    def _run(self, rows: list[tuple[str, Row]], ranks: int, *, resume: bool) -> int:
        """How many of the rows have an outcome now: all of them, or those up to the first that fails."""
        for old in self.folder.glob("*.[0-9]"):
            old.unlink()
        error: RanksFailedError | None = None
        try:
            self.gloo.run(_train_each, rows, str(self.folder), resume=resume, world_size=ranks, timeout=170.0)
        except RanksFailedError as failed:
            error = failed
        for number, (name, _) in enumerate(rows):
            files = [self.folder / f"{number}.{rank}" for rank in range(ranks)]
            if not all(file.exists() for file in files):
                self.found[name, resume] = error
                return number + 1
            self.found[name, resume] = [pickle.loads(file.read_bytes()) for file in files]
        return len(rows)


@pytest.fixture(scope="module")
def results(gloo: ProcessPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    of_module = [each for each in request.session.items if each.path == request.path]
    names = [each.callspec.params["name"] for each in of_module if isinstance(each, pytest.Function)]
    return Results(gloo, tmp_path_factory.mktemp("matrix"), names)


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest one, and where. Whole weights have the other names of tied ones, too."""
    return max((float((found[name].double() - value.double()).abs().max()), name) for name, value in expected.items())


@pytest.mark.timeout(400)  # The first row of a number of ranks runs all of them.
@pytest.mark.parametrize("name", ALL)
def test_a_row_trains_as_one_process(results: Results, name: str) -> None:
    row, of_ranks = ALL[name], results.of(name)
    if isinstance(of_ranks, Exception):
        raise of_ranks
    if isinstance(of_ranks[0], str):  # Refused.
        assert set(map(type, of_ranks)) == {str}, of_ranks
        return
    expected, losses = alone(row)
    runs, rel = [(row, of_ranks)], 1e-4 if row.precision == "32-true" else 0.02
    if row.saved_at:
        resumed = results.of(name, resume=True)
        if isinstance(resumed, Exception):
            raise resumed
        runs.append((replace(row, **row.resumed), resumed))
        if not set(row.resumed) & {"ranks", "options"}:
            assert all(torch.equal(resumed[0][0][key], value) for key, value in of_ranks[0][0].items()), "not bit-equal"
    for of_row, found in runs:
        for weights, _ in found:
            if weights or weights is found[0][0]:  # Some frameworks give them to all ranks.
                difference, where = _difference(weights, expected)
                assert difference <= row.tolerance, f"{where} differs by {difference:.1e}"
        reported = torch.tensor([each for _, each in found]).mean(0).tolist()
        assert reported == pytest.approx(losses[-len(reported) :] if reported else [], rel=rel), of_row
