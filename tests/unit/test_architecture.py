"""What docs/architecture.md names exists, and the versions that pages name are those of pyproject.toml."""

from __future__ import annotations

import ast
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


def _allowed() -> dict[str, tuple[str, str]]:
    """Package -> lowest version, and the last minor version below the bound; Python is one of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    found: dict[str, tuple[str, str]] = {}
    for line in [*lines, f"python{project['requires-python']}"]:
        requirement = Requirement(line)
        bounds = {each.operator: each.version for each in requirement.specifier}
        major, _, minor = bounds.get("<", "").partition(".")
        if ">=" in bounds:
            found[requirement.name] = bounds[">="], f"{major}.{int(minor) - 1}" if minor else ""
    return found


def test_pages_name_the_versions_of_torch_that_are_allowed() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.*"), *ROOT.glob("recipes/*/*.md"), *PACKAGE.glob("compat/*.py")]
    pages = [page for page in pages if page.name != "CHANGELOG.md"]
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages}
    named = {page: set(re.findall(r"torch\s+(\d+\.\d+) to (\d+\.\d+)", text)) for page, text in texts.items()}
    assert all(versions <= {_allowed()["torch"]} for versions in named.values()), named
    for page in ("README.md", "CONTRIBUTING.md", "docs/llms.txt", "lightning_muon/compat/torch.py"):
        assert named[page]


@pytest.mark.parametrize("page", ["README.md", "docs/llms.txt"])
def test_a_page_names_the_oldest_versions_of_frameworks(page: str) -> None:
    allowed, text = _allowed(), " ".join((ROOT / page).read_text(encoding="utf-8").replace("\n>", "\n").split())
    for package in ("Python", "Lightning", "Accelerate", "transformers"):
        wanted = allowed[package.lower()][0]
        assert re.search(rf"{package} {re.escape(wanted)}(?:\+| or later|,|\.(?!\d))", text), (package, wanted)
