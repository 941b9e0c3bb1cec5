"""Builds the wheel, installs it into an empty environment, and runs README and the quickstart there; takes minutes.

Needs a package index: ``python -m scripts.check_wheel [--wheel FILE] [--out FOLDER] [-- ARGUMENTS FOR PIP]``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

from scripts.source_files import ROOT, report

TOP_LEVEL = {"lightning_muon"}
# Without an extra, then with [lightning].
BASE_COMMANDS = ("torchrun --nproc_per_node 2 plain_loop.py", "lightning-muon doctor --help")
COMMANDS = (
    "python train.py",
    "lightning-muon plan --shapes t5-small --shard-size 2",
    "lightning-muon verify checkpoints",
)


def quickstart() -> str:
    """The program of docs/quickstart.md."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return program


def complaints(wheel: Path) -> Iterator[str]:
    """What the page of a package index would lack, and what the wheel has too much."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        fields = message_from_bytes(archive.read(metadata))
    for name in sorted({name.split("/")[0] for name in names} - TOP_LEVEL - {metadata.split("/")[0]}):
        yield f"{wheel.name} installs {name!r}, which is not the package"
    if "lightning_muon/py.typed" not in names:
        yield f"{wheel.name} has no py.typed"
    urls = " ".join(fields.get_all("Project-URL", []))
    for wanted in ("Repository", "Documentation", "Changelog", "Issues"):
        if f"{wanted}, https://" not in urls:
            yield f"no URL {wanted!r} in the metadata"
    if not (fields["Author"] or fields["Author-email"]):
        yield "no author in the metadata"
    text = str(fields.get_payload())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "http://", "#")):
            yield f"the long description links to {target!r}, which leads nowhere on a package index"


def try_out(wheel: Path, folder: Path, pip_arguments: list[str]) -> None:
    """Install the wheel into an empty environment, and run what a reader of README and the quickstart runs.

    Raises:
        subprocess.CalledProcessError: If a command fails.
    """
    venv.create(folder / "environment", with_pip=True)
    commands = folder / "environment" / "bin"
    install = [commands / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *pip_arguments]
    (folder / "train.py").write_text(quickstart(), encoding="utf-8")
    shutil.copy(ROOT / "examples" / "plain_loop.py", folder)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for extra, lines in (("", BASE_COMMANDS), ("[lightning]", COMMANDS)):
        subprocess.run([*install, f"{wheel}{extra}"], check=True)
        for line in lines:
            print("+", line, flush=True)
            program, *arguments = line.split()
            subprocess.run([commands / program, *arguments], cwd=folder, env=environment, check=True)


def main() -> int:
    """Check the wheel; 1 if there is a complaint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="a wheel that is there; by default one is built")
    parser.add_argument("--out", type=Path, help="where to leave the wheel that is built")
    parser.add_argument("pip_arguments", nargs="*", metavar="-- ARGUMENTS FOR PIP")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = options.wheel
        if wheel is None:
            target = options.out or folder / "dist"
            build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", target, ROOT]
            subprocess.run(build, check=True)
            wheel = max(target.glob("*.whl"), key=lambda path: path.stat().st_mtime)
        found = list(complaints(wheel))
        if not found:
            try_out(wheel.resolve(), folder, options.pip_arguments)
    return report(found, "wheel")


if __name__ == "__main__":
    sys.exit(main())
