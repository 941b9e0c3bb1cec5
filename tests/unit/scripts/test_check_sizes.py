from __future__ import annotations

from scripts.check_sizes import crowded_signatures, long_files, long_functions


def _function(num_lines: int, docstring_lines: int = 0) -> str:
    """Source of a function with ``num_lines`` lines of code, the first one included, and a docstring."""
    docstring = ['    """' + "\n    ".join(["text"] * docstring_lines) + '"""'] if docstring_lines else []
    return "\n".join(["def f() -> None:", *docstring, *["    pass"] * (num_lines - 1)])


def test_files_above_600_lines_are_named() -> None:
    assert not list(long_files("a.py", "x = 1\n" * 600))
    assert list(long_files("a.py", "x = 1\n" * 601)) == ["a.py: 601 lines, more than 600"]


def test_functions_above_60_lines_are_named() -> None:
    assert not list(long_functions("a.py", _function(60)))
    assert list(long_functions("a.py", _function(61))) == ["a.py:1 f: 61 lines, more than 60"]


def test_the_docstring_of_a_function_does_not_count() -> None:
    assert not list(long_functions("a.py", _function(60, docstring_lines=30)))
    assert len(list(long_functions("a.py", _function(61, docstring_lines=30)))) == 1


def test_methods_are_checked_and_self_is_no_parameter() -> None:
    template = "class A:\n    def f(self, {}): ...\n"
    assert not list(crowded_signatures("a.py", template.format("a, b, c, d, e")))
    (complaint,) = crowded_signatures("a.py", template.format("a, b, c, d, e, f"))
    assert complaint == "a.py:2 f: 6 positional parameters, at most 5"


def test_keyword_only_parameters_and_overrides_are_free() -> None:
    assert not list(crowded_signatures("a.py", "def f(a, b, c, d, e, *, g, h): ...\n"))
    assert not list(crowded_signatures("a.py", "class A(B):\n    @override\n    def f(self, a, b, c, d, e, g): ...\n"))
