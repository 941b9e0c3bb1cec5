"""What ``make docs`` does beside mkdocs, so that the same pages can be read on GitHub.

Links from a page to files of the repository outside of docs/ become links to GitHub; a file that is not there is an
error. Every page must be in docs/llms.txt.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.plugins.docs_hooks")  # Warnings of this name count in `mkdocs build --strict`.

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)(#[^)\s]*)?(?=\))")
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Links that leave docs/ lead to GitHub."""

    def to_github(found: re.Match[str]) -> str:
        target = Path(os.path.normpath((ROOT / "docs" / page.file.src_uri).parent / found[1]))
        if not target.exists():
            log.warning("%s links to %s, which is not there", page.file.src_uri, found[1])
        kind = "tree" if target.is_dir() else "blob"
        return f"{config.repo_url}/{kind}/main/{target.relative_to(ROOT).as_posix()}{found[2] or ''}"

    return _LINK.sub(to_github, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name things as Sphinx does; and a list that GitHub shows as such must be one here."""
    return _ROLE.sub("", html).replace("::</p>", ":</p>")


def on_nav(nav: Any, *, config: Any, **_: Any) -> Any:
    """Compare the pages with docs/llms.txt."""
    listed = (Path(config.docs_dir) / "llms.txt").read_text(encoding="utf-8")
    for page in nav.pages:
        if f"/docs/{page.file.src_uri})" not in listed:
            log.warning("docs/llms.txt does not list %s", page.file.src_uri)
    return nav
