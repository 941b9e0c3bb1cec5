"""Configurations drawn at random train as one process does, or are refused; 500 of them: see benchmarks."""

from __future__ import annotations

import pytest

from benchmarks.random_configurations import draw_configuration, run
from tests.support.processes import ProcessPool


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_configuration_trains_as_one_process_or_is_refused(gloo: ProcessPool, num_ranks: int) -> None:
    seeds = [seed for seed in range(100) if draw_configuration(seed).num_ranks == num_ranks][:6]
    for outcomes in gloo.run(run, seeds, world_size=num_ranks):
        kinds = [outcome.partition(":")[0] for _, outcome in outcomes]
        assert [seed for seed, _ in outcomes] == seeds, outcomes
        assert set(kinds) == {"equal", "ValueError"}, outcomes
