from __future__ import annotations

from pathlib import Path

import pytest

from scripts.check_test_pairs import check


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A package with one module that has a function, one that has none, and no tests."""
    (tmp_path / "lightning_muon" / "a").mkdir(parents=True)
    (tmp_path / "lightning_muon" / "a" / "b.py").write_text("def f() -> None: ...\n")
    (tmp_path / "lightning_muon" / "a" / "constants.py").write_text("X = 1\n")
    return tmp_path


def test_a_module_with_a_function_and_no_test_is_named(root: Path) -> None:
    (complaint,) = check(root, {})
    assert complaint.startswith("lightning_muon/a/b.py: no ")


@pytest.mark.parametrize("folder", ["unit/a", "distributed/a", "integration/a", "distributed", "integration"])
def test_a_test_file_of_the_same_name_is_enough(root: Path, folder: str) -> None:
    (root / "tests" / folder).mkdir(parents=True)
    (root / "tests" / folder / "test_b.py").touch()
    assert not list(check(root, {}))


def test_unit_tests_mirror_the_folders_of_the_package(root: Path) -> None:
    (root / "tests" / "unit").mkdir(parents=True)
    (root / "tests" / "unit" / "test_b.py").touch()
    assert len(list(check(root, {}))) == 1


def test_an_exception_is_accepted_while_it_is_needed(root: Path) -> None:
    exceptions = {"lightning_muon/a/b.py": "its reason"}
    assert not list(check(root, exceptions))
    (root / "tests" / "unit" / "a").mkdir(parents=True)
    (root / "tests" / "unit" / "a" / "test_b.py").touch()
    (complaint,) = check(root, exceptions)
    assert "is not needed" in complaint


def test_functions_of_a_package_file_are_tested_under_the_name_of_the_package(root: Path) -> None:
    (root / "lightning_muon" / "a" / "b.py").unlink()
    (root / "lightning_muon" / "__init__.py").write_text("def __getattr__(name: str) -> object: ...\n")
    (root / "tests" / "unit").mkdir(parents=True)
    (root / "tests" / "unit" / "test_lightning_muon.py").touch()
    assert not list(check(root, {}))
