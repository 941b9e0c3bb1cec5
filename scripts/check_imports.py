"""Rules about imports that import-linter cannot express, because it sees an external package as one whole.

- ``lightning_muon/math`` is tensors in, tensors out: no ``torch.distributed``.
- Private names of torch and Lightning are imported in ``lightning_muon/compat`` only.
- No files of the package import each other in a circle, also not for types only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from scripts.source_files import python_files, report

FOREIGN = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate")


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that the module imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def check(name: str, text: str) -> Iterator[str]:
    """Complaints about one file of the package; ``name`` is its path with slashes."""
    tree = ast.parse(text)
    in_math = name.startswith("lightning_muon/math/")
    for line, dotted in imported_names(tree):
        if in_math and f"{dotted}.".startswith("torch.distributed."):
            yield f"{name}:{line} imports {dotted}: the maths knows no process groups"
        is_private = any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))
        if is_private and dotted.split(".")[0] in FOREIGN and not name.startswith("lightning_muon/compat/"):
            yield f"{name}:{line} imports {dotted}: private names belong in lightning_muon/compat"
    if in_math:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                yield f"{name}:{node.lineno} uses torch.distributed: the maths knows no process groups"


def circle(files: Mapping[str, str]) -> Iterator[str]:
    """A complaint if files, path -> text, import each other in a circle; those of a package's names do not count."""
    modules = {name.removesuffix(".py").replace("/", "."): text for name, text in files.items()}
    imported = {
        name: {
            other
            for _, dotted in imported_names(ast.parse(text))
            for other in (dotted, dotted.rpartition(".")[0])
            if other in modules and other != name
        }
        for name, text in modules.items()
    }
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        yield f"imports in a circle: {' <- '.join(error.args[1])}"


def main() -> int:
    """Check the package; 1 if there is a complaint."""
    files = {path.as_posix(): text for path, text in python_files(["lightning_muon"])}
    complaints = [complaint for name, text in files.items() for complaint in check(name, text)]
    complaints += circle(files)
    return report(complaints, "imports")


if __name__ == "__main__":
    sys.exit(main())
