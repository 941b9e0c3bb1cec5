"""What ``tests/conftest.py`` promises to every test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest
import torch

from lightning_muon.math import newton_schulz
from tests.support.programs import ROOT


def test_shapes_in_the_annotations_of_the_maths_are_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        newton_schulz.orthogonalize(
            torch.zeros(3), coefficients=(1.0, 1.0, 1.0), num_steps=1, eps=1e-7, compute_dtype=torch.float32
        )


def test_a_test_that_hangs_is_ended_by_its_time_limit(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert 0 < float(request.config.getini("timeout")) <= 180
    hanging = tmp_path / "test_hanging.py"
    hanging.write_text("import time\n\ndef test_it():\n    time.sleep(60)\n")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "--timeout", "1", str(hanging)],
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Timeout" in done.stdout
