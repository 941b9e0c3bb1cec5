"""When a strategy restores what; whole runs are in tests/integration/test_resume.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_muon.integrations.lightning import checkpoints
from tests.integration.training import PACKAGES, strategy_class
from tests.support.processes import ProcessPool


@pytest.mark.parametrize("package", PACKAGES)
def test_restoring_starts_before_setup_and_ends_after_it(package: Any) -> None:
    pytest.importorskip(package)
    strategy = strategy_class(package)()
    assert not strategy.restore_checkpoint_after_setup
    assert strategy.lightning_restore_optimizer


def _interrupted(ranks: tuple[int, ...]) -> str:
    checkpoints._SECONDS_TO_FAIL_TOGETHER = 0.5
    trainer = SimpleNamespace(state=SimpleNamespace(status="interrupted"), global_step=7)
    if dist.get_rank() not in ranks:
        return "elsewhere"
    try:
        checkpoints.require_all_ranks(trainer)
    except RuntimeError as error:
        return str(error)
    return "saves"


def test_all_ranks_that_fail_together_may_save(gloo: ProcessPool) -> None:
    assert gloo.run(_interrupted, (0, 1, 2), world_size=3) == ["saves"] * 3


def test_some_ranks_that_fail_may_not(gloo: ProcessPool) -> None:
    messages = gloo.run(_interrupted, (0, 2), world_size=3)
    assert messages[1] == "elsewhere"
    assert "only 2 failed" in messages[0]
    assert "only 2 failed" in messages[2]
