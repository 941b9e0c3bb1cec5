"""The files, classes and functions that docs/architecture.md names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_muon"
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def _names(path: Path) -> set[str]:
    """Functions, classes, and ``Class.method`` of a file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_the_map_names_what_exists() -> None:
    missing: list[str] = []
    path = PACKAGE
    for file, name in re.findall(r"`([\w/]*\w\.py)?(?:::([\w.]+))?`", TEXT):
        if file:
            path = PACKAGE / file
        if (file or name) and not path.is_file():
            missing.append(file)
        elif name and name not in _names(path):
            missing.append(f"{path.relative_to(PACKAGE)}::{name}")
    assert not missing


def test_the_map_names_every_package() -> None:
    folders = {each.parent.name for each in PACKAGE.glob("*/__init__.py")}
    stack = TEXT.split("```")[1]
    assert folders == set(re.findall(r"^(\w+)/", stack, flags=re.MULTILINE))


def test_no_two_things_have_one_name() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    imports = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {(node.module, alias.name) for node in imports for alias in node.names}
    places: dict[str, list[str]] = {}
    for path, tree in trees.items():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in tree.body:
            is_class = isinstance(node, ast.ClassDef) and node.name[0] != "_"
            if is_class or (isinstance(node, ast.FunctionDef) and (module, node.name) in imported):
                places.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}
