"""Which ranks may save after an exception; whole runs are in tests/integration/test_resume.py."""

from __future__ import annotations

from types import SimpleNamespace

import torch.distributed as dist

from lightning_muon.integrations.lightning import checkpoints
from tests.support.processes import ProcessPool


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


def test_only_ranks_that_all_fail_may_save(gloo: ProcessPool) -> None:
    assert gloo.run(_interrupted, (0, 1, 2), world_size=3) == ["saves"] * 3
    messages = gloo.run(_interrupted, (0, 2), world_size=3)
    assert messages[1] == "elsewhere" and all("only 2 failed" in messages[rank] for rank in (0, 2))
