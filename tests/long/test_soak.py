"""The short form of ``make soak``: five kills at random times in one training."""

import random
from pathlib import Path

from tests.long.soak import run_series
from tests.support.processes import ProcessPool


def test_losses_after_kills_are_those_of_a_whole_run(gloo: ProcessPool, tmp_path: Path) -> None:
    line = run_series(gloo, tmp_path, "flexdemo", kills=5, num_steps=14, draw=random.Random(1))
    assert line.startswith("flexdemo: 5 kills")
