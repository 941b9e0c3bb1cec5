"""Every row ends with the weights, and has the losses, of one process on the whole batches.

``HYPOTHESIS_PROFILE=long`` draws 300 further rows instead of 12. ``-k "zero2 and lightning"`` runs the rows so named.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.matrix.alone import alone
from tests.matrix.frameworks import Task, train
from tests.matrix.row import Found, Row
from tests.matrix.rows import ROWS, draw
from tests.support.processes import ProcessPool, RanksFailedError

NUM_DRAWN = 300 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 12
ALL = ROWS | {f"drawn {seed}": draw(seed) for seed in range(NUM_DRAWN)}
# Process groups of a call stay until it ends.
MOST_IN_ONE_CALL = 25


def _train_each(rows: list[tuple[str, Row]], folder: str, *, resume: bool) -> list[Found]:
    """One training after the other."""
    found = list[Found]()
    for number, (name, row) in enumerate(rows):
        directory = os.path.join(folder, re.sub(r"\W+", "-", name))
        os.makedirs(directory, exist_ok=True)
        torch.manual_seed(number)
        try:
            with mock.patch.dict(os.environ):
                found.append(train(Task(row, directory, resume)))
        except Exception as error:
            raise AssertionError(f"the row {name!r} has failed, behind which no other has run") from error
    return found


class Results:
    """What the ranks have found, by row; the rows of a number of ranks run in few calls of the pool."""

    def __init__(self, gloo: ProcessPool, folder: Path, names: Iterable[str]) -> None:
        self.gloo, self.folder, self.names = gloo, folder, list(dict.fromkeys(names))
        self.found: dict[tuple[str, bool], list[Found] | RanksFailedError] = {}

    def of(self, name: str, *, resume: bool = False) -> list[Found]:
        """The results of all ranks."""
        if (name, resume) not in self.found:
            rows = [(each, ALL[each].when_resumed if resume else ALL[each]) for each in self.names]
            ranks = dict(rows)[name].ranks
            rows = [(each, row) for each, row in rows if row.ranks == ranks and (not resume or row.saved_at)]
            for each, _ in rows if resume else ():
                self.of(each)
            for first in range(0, len(rows), MOST_IN_ONE_CALL):
                self._run(rows[first : first + MOST_IN_ONE_CALL], resume=resume)
        found = self.found[name, resume]
        if isinstance(found, Exception):
            raise found
        return found

    def _run(self, rows: list[tuple[str, Row]], *, resume: bool) -> None:
        keys, ranks = [(name, resume) for name, _ in rows], rows[0][1].ranks
        try:
            of_ranks = self.gloo.run(
                _train_each, rows, str(self.folder), resume=resume, world_size=ranks, timeout=170.0
            )
            self.found |= dict(zip(keys, map(list, zip(*of_ranks, strict=True)), strict=True))
        except RanksFailedError as error:
            self.found |= dict.fromkeys(keys, error)


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
    expected, losses = alone(row)
    runs, rel = [(row, of_ranks)], 1e-4 if row.precision == "32-true" else 0.02
    if row.saved_at:
        resumed = results.of(name, resume=True)
        runs.append((row.when_resumed, resumed))
        if not set(row.resumed) & {"ranks", "options"}:
            assert all(torch.equal(resumed[0][0][key], value) for key, value in of_ranks[0][0].items()), "not bit-equal"
    for of_row, found in runs:
        for weights, _ in found:
            if weights or weights is found[0][0]:  # Some frameworks give them to all ranks.
                difference, where = _difference(weights, expected)
                assert difference <= row.tolerance, f"{where} differs by {difference:.1e}"
        reported = torch.tensor([each for _, each in found]).mean(0).tolist()
        assert reported == pytest.approx(losses[-len(reported) :] if reported else [], rel=rel), of_row
