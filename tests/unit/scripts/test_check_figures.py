"""Sections with figures, and the commits that they name."""

import pytest

from scripts import check_figures

PAGE = """# Title

## Fast

| a | b |
| --- | --- |
| 1 | 2 |

```
# commit 00000000
```

`python -m benchmarks.loss`, commit 04c1224e. Another one's commit 0a059a4; Commit
a36ec679.

### Formulas

No figures.
"""


def test_a_section_ends_at_the_next_heading() -> None:
    assert [heading for heading, _ in check_figures.sections(PAGE)] == ["Title", "Fast", "Formulas"]
    assert check_figures.commits_of(PAGE, "Fast") == ["04c1224e", "a36ec679"]
    assert check_figures.commits_of(PAGE, "Formulas") == []
    assert check_figures.commits_of(PAGE, "Slow") is None


def test_a_table_must_say_what_it_measures() -> None:
    assert list(check_figures.unlisted("page.md", PAGE)) == [
        "page.md, Fast: a table, but ROOMS does not say what it measures"
    ]
    assert not list(check_figures.unlisted(check_figures.PERFORMANCE, PAGE.replace("## Fast", "## Gradients")))


def test_an_age_is_no_complaint_and_a_clone_without_history_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"rev-parse": "false", "merge-base": "", "rev-list": "7", "show": "2026-01-02"}
    monkeypatch.setattr(check_figures, "ROOMS", {("README.md", "Title"): "math optim"})
    monkeypatch.setattr(check_figures, "unlisted", lambda *_: [])
    monkeypatch.setattr(check_figures, "commits_of", lambda *_: ["04c1224e"])
    monkeypatch.setattr(check_figures, "git", lambda *words: answers[words[0]])
    assert check_figures.main() == 0
    assert "Title: 04c1224e of 2026-01-02, 7 commits since in math, optim" in capsys.readouterr().out
    monkeypatch.setattr(check_figures, "git", lambda *words: answers[words[0]] if words[0] != "merge-base" else None)
    assert check_figures.main() == 1
    assert "commit 04c1224e is not in the history" in capsys.readouterr().out
    monkeypatch.setattr(check_figures, "git", lambda *_: None)
    assert check_figures.main() == 0
    assert "no history" in capsys.readouterr().out
