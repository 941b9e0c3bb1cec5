"""The files that the checks look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE_FOLDERS = ("lightning_muon", "recipes", "benchmarks", "examples", "scripts")


def python_files(folders: Sequence[str], root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Every Python file below ``folders`` as (path relative to ``root``, text), in a fixed order."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root), path.read_text(encoding="utf-8")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method in ``tree``, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def report(complaints: Sequence[str], what: str) -> int:
    """Print the complaints or that there are none; the exit status of the script."""
    for complaint in complaints:
        print(complaint)
    print(f"{what}: {f'{len(complaints)} to mend' if complaints else 'ok'}")
    return 1 if complaints else 0
