"""Every mode, optimizer and schedule gives the bits that are written in ``golden.json``.

After a change that is meant to change them: ``python -m tests.golden.test_golden``, and the reason in the commit.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_muon.cli.plan_model import Mesh
from lightning_muon.cli.plan_step import Setting, exchange_groups
from lightning_muon.params.shapes import read_shapes, shipped_shapes
from lightning_muon.schedule.simulate import PRESETS
from tests.golden.trainings import digest
from tests.support.programs import ROOT, program_environment

FILE = Path(__file__).with_name("golden.json")
# The code that x86 processors have in common (those with FMA: all since 2015): sums in one order.
SAME_EVERYWHERE = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
TORCH = "2.13"  # Another version may add in another order.
needs_pinned = pytest.mark.skipif(
    not torch.__version__.startswith(f"{TORCH}.") or platform.machine() != "x86_64" or sys.platform != "linux",
    reason=f"the digests are those of torch {TORCH} for Linux on x86",
)


def trained(size: int) -> dict[str, str]:
    """Digests of all trainings on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    run = subprocess.run(
        [*command, "-m", "tests.golden.trainings"],
        cwd=ROOT,
        env=program_environment() | SAME_EVERYWHERE,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return json.loads(run.stdout.splitlines()[-1])


def plans() -> dict[str, str]:
    """Model, replicas and shards -> digest of (matrix, its owners) and of the buckets, for each exchange group."""
    found = dict[str, str]()
    for name in shipped_shapes():
        setting = Setting(model=read_shapes(name), cost=PRESETS["reference"])
        for mesh in ((1, 8), (2, 4), (8, 8)):
            groups = [
                ([(each.name, each.rows, each.cols, (each.owner,)) for each in group.matrices], list(group.buckets))
                for group in exchange_groups(setting, Mesh(*mesh), setting.config.dedupe)
            ]
            found[f"{name} {mesh[0]}x{mesh[1]}"] = digest(groups)
    return found


def golden() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8"))


@needs_pinned
@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_trainings_end_with_the_same_bits(size: int) -> None:
    assert trained(size) == golden()[f"{size} ranks"]


def test_plans_of_all_shipped_shapes_are_the_same() -> None:
    assert plans() == golden()["plans"]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    content = {f"{size} ranks": trained(size) for size in range(1, 5)} | {"plans": plans()}
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
