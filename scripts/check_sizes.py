"""Files of at most 600 lines, functions of at most 60, at most 5 positional parameters.

The lines of a function are counted without its docstring: a well explained function is not a long one.
A method with ``@override`` has the parameters that its base class gave it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from scripts.source_files import CODE_FOLDERS, functions, python_files, report

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL = 5


def check_file(name: str, text: str) -> Iterator[str]:
    """Complaint if the file is too long."""
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{name}: {num_lines} lines, at most {MAX_FILE_LINES}"


def check_functions(name: str, text: str) -> Iterator[str]:
    """Complaints about functions that are too long or take too many positional parameters."""
    for node in functions(ast.parse(text)):
        where = f"{name}:{node.lineno} {node.name}"
        num_lines = _code_lines(node)
        if num_lines > MAX_FUNCTION_LINES:
            yield f"{where}: {num_lines} lines, at most {MAX_FUNCTION_LINES}"
        num_positional = _positional_parameters(node)
        if num_positional > MAX_POSITIONAL and not _is_override(node):
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


def _is_override(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).rpartition(".")[2] == "override" for decorator in node.decorator_list)


def main() -> int:
    """Check all files; 1 if there is a complaint."""
    complaints: list[str] = []
    for path, text in python_files((*CODE_FOLDERS, "tests")):
        complaints += check_file(str(path), text)
        if path.parts[0] != "tests":
            complaints += check_functions(str(path), text)
    return report(complaints, "sizes of files and functions")


if __name__ == "__main__":
    sys.exit(main())
