"""The public face of the package."""

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_muon

API = Path(__file__).with_name("public_api.txt")


def public_api() -> Iterator[str]:
    """A line for each public name, with the arguments it takes and their defaults."""
    for name in sorted(lightning_muon.__all__):
        value = getattr(lightning_muon, name)
        if inspect.isclass(value) and issubclass(value, Exception):
            yield name
        else:
            parameters = inspect.signature(value).parameters.values()
            untyped = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
            yield f"{name}{inspect.Signature(untyped)}"


def test_the_public_api_is_that_of_the_snapshot() -> None:
    """After an intended change: ``python -m tests.unit.test_lightning_muon``, and a line in CHANGELOG.md."""
    assert list(public_api()) == API.read_text(encoding="utf-8").splitlines()
    for name in ("accelerate", "hf"):
        assert getattr(lightning_muon, name).__name__ == f"lightning_muon.{name}"
    with pytest.raises(AttributeError, match="no attribute 'Muon'"):
        _ = lightning_muon.Muon


def test_the_import_is_light() -> None:
    heavy = {
        "accelerate", "jsonargparse", "lightning", "matplotlib",
        "pytorch_lightning", "torch", "torchmetrics", "transformers", "yaml",
    }  # fmt: skip
    script = (
        "import sys, lightning_muon, lightning_muon.schedule.draw\n"
        f"print(sorted({heavy} & {{name.split('.')[0] for name in sys.modules}}))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_import_starts_no_threads() -> None:
    """A fork, as of ``notebook_launcher``, has the locks of OpenMP's threads and not the threads."""
    script = (
        "import os, torch, accelerate\n"
        "def count(): return len(os.listdir('/proc/self/task'))\n"
        "before = count()\n"
        "import lightning_muon.accelerate, lightning_muon.cli.main\n"
        "lightning_muon.FlexDeMoConfig(replicator=lightning_muon.DCTTopK(top_k=8)), lightning_muon.FlexDeMo\n"
        "print(before - count())"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "0\n"


if __name__ == "__main__":
    API.write_text("\n".join(public_api()) + "\n", encoding="utf-8")
