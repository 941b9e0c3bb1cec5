"""Every module of the package that defines a function has a test file of the same name.

``lightning_muon/a/b.py`` is tested by ``tests/unit/a/test_b.py``. What needs several processes or a Trainer is tested
in ``tests/distributed`` or ``tests/integration``, by the same path or by ``test_b.py`` in the folder itself.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.source_files import ROOT, functions, python_files, report

PACKAGE = "lightning_muon"
FLAT_KINDS = ("distributed", "integration")

# Module -> why it has no test file of its own. An entry that is not needed any more is a complaint.
EXCEPTIONS: dict[str, str] = {}


def candidates(module: Path) -> list[Path]:
    """Where the tests of ``module`` (relative to the package) may be."""
    parts = module.with_suffix("")
    stem = (parts.parent.name or PACKAGE) if parts.name == "__init__" else parts.name
    mirrored = [Path("tests", kind, parts.parent, f"test_{stem}.py") for kind in ("unit", *FLAT_KINDS)]
    return mirrored + [Path("tests", kind, f"test_{stem}.py") for kind in FLAT_KINDS]


def check(root: Path, exceptions: Mapping[str, str]) -> Iterator[str]:
    """Complaints about modules without tests and about outdated exceptions."""
    open_exceptions = dict(exceptions)
    for path, text in python_files([PACKAGE], root):
        wanted = candidates(path.relative_to(PACKAGE))
        if not any(functions(ast.parse(text))) or any((root / test).is_file() for test in wanted):
            continue
        if open_exceptions.pop(str(path), None) is None:
            yield f"{path}: no {wanted[0]}"
    for path in open_exceptions:
        yield f"{path}: the exception in {Path(__file__).name} is not needed"


def main() -> int:
    """Check the whole package; 1 if there is a complaint."""
    return report(list(check(ROOT, EXCEPTIONS)), "test files")


if __name__ == "__main__":
    sys.exit(main())
