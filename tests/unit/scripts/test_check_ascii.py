from __future__ import annotations

import pytest

from scripts.check_ascii import check


def test_plain_text_is_accepted() -> None:
    assert not list(check("a.py", b"x = 1\n"))
    assert not list(check("empty.py", b""))
    assert not list(check("Makefile", b"all:\n\techo\n"))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("x = '\u00e9'\n".encode(), "a.py:1 has a character that is not ASCII"),
        (b"x = 1\n\ty = 2\n", "a.py:2 has a tab"),
        (b"x = 1", "must end with one newline"),
        (b"x = 1\n\n", "must end with one newline"),
    ],
)
def test_a_stray_character_is_named_with_its_line(content: bytes, complaint: str) -> None:
    (found,) = check("a.py", content)
    assert complaint in found
