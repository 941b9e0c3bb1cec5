"""Warns of files above 600 lines and functions above 60; refuses more than 5 positional parameters, and too many lines.

A change that needs more lines than its folder may have says why, and moves the number in the same commit.
The lines of a function are counted without its docstring: a well explained function is not a long one.
A method with ``@override`` has the parameters that its base class gave it; a kernel of Triton knows no others.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.source_files import CODE_FOLDERS, ROOT, functions, python_files, report

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 5
# Files -> the most lines of all together, and the most files.
BUDGETS = {
    "lightning_muon/**/*.py": (24_324, 113),
    "tests/**/*.py": (20_000, 182),
    "benchmarks/**/*.py": (3_000, 16),
    "recipes/**/*.*": (3_200, 38),
    "docs/**/*.md": (3_400, 22),
    "README.md": (180, 1),
}


def beyond_budgets(budgets: Mapping[str, tuple[int, int]] = BUDGETS, root: Path = ROOT) -> Iterator[str]:
    """A complaint about each row of the budget that is exceeded."""
    for pattern, (most_lines, most_files) in budgets.items():
        files = [path for path in root.glob(pattern) if path.is_file() and path.suffix != ".pyc"]
        num_lines = sum(len(path.read_bytes().splitlines()) for path in files)
        if num_lines > most_lines or len(files) > most_files:
            counted = f"{num_lines} lines in {len(files)} files"
            yield f"{pattern}: {counted}, budget {most_lines} in {most_files}; what can go in return?"


def long_files(name: str, text: str) -> Iterator[str]:
    """A warning if the file is long."""
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{name}: {num_lines} lines, more than {MAX_FILE_LINES}"


def long_functions(name: str, text: str) -> Iterator[str]:
    """A warning for each long function."""
    for node in functions(ast.parse(text)):
        num_lines = _code_lines(node)
        if num_lines > MAX_FUNCTION_LINES:
            yield f"{name}:{node.lineno} {node.name}: {num_lines} lines, more than {MAX_FUNCTION_LINES}"


def crowded_signatures(name: str, text: str) -> Iterator[str]:
    """A complaint about each function that takes too many positional parameters."""
    for node in functions(ast.parse(text)):
        num_positional = _positional_parameters(node)
        if num_positional > MAX_POSITIONAL and not _is_prescribed(node):
            where = f"{name}:{node.lineno} {node.name}"
            yield f"{where}: {num_positional} positional parameters, at most {MAX_POSITIONAL}"


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        num_lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return num_lines


def _positional_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return len(names) - (1 if names[:1] in (["self"], ["cls"]) else 0)


def _is_prescribed(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name.rpartition(".")[2] == "override" for name in decorators)


def main() -> int:
    """Check all files; 1 if there is a complaint. Warnings do not count."""
    warnings: list[str] = []
    complaints = list(beyond_budgets())
    for path, text in python_files((*CODE_FOLDERS, "tests")):
        name = str(path)
        warnings += long_files(name, text)
        if path.parts[0] != "tests":
            warnings += long_functions(name, text)
            complaints += crowded_signatures(name, text)
    for warning in warnings:
        print(f"warning: {warning}")
    return report(complaints, "sizes")


if __name__ == "__main__":
    sys.exit(main())
