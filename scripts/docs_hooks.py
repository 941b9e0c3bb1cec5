"""What ``make docs`` does beside mkdocs, so that the same pages can be read on GitHub.

Links from a page to files of the repository outside of docs/ become links to GitHub. With ``--strict`` these are
errors: a link to a file that is not there, a public name that docs/api.md lacks, a page that docs/llms.txt lacks, and
a list or a table that GitHub shows as such and mkdocs does not.
"""

from __future__ import annotations

import ast
import logging
import os
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.plugins.docs_hooks")  # Warnings of this name count in `mkdocs build --strict`.

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)(#[^)\s]*)?(?=\))")
_CODE = re.compile(r"<code.*?</code>", re.DOTALL)
# Python-Markdown wants a blank line before a list, and 4 spaces inside of one.
_LOST = re.compile(r"\n\s*(?:[-*] |\d+\. |\|)")
_PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Links that leave docs/ lead to GitHub."""

    def to_github(found: re.Match[str]) -> str:
        target = Path(os.path.normpath((ROOT / "docs" / page.file.src_uri).parent / found[1]))
        if not target.exists():
            log.warning("%s links to %s, which is not there", page.file.src_uri, found[1])
        kind = "tree" if target.is_dir() else "blob"
        return f"{config.repo_url}/{kind}/main/{target.relative_to(ROOT).as_posix()}{found[2] or ''}"

    if page.file.src_uri == "api.md":
        shown = {line.split(".")[-1] for line in markdown.splitlines() if line.startswith(":::")}
        shown |= set(re.findall(r"heading: (\w+)", markdown)) | set(re.findall(r"^`(\w+)` is", markdown, re.MULTILINE))
        for name in sorted(set(_public_names()) - shown):
            log.warning("docs/api.md does not show %s", name)
    return _LINK.sub(to_github, markdown)


def _public_names() -> list[str]:
    """``__all__`` of the package, which is not imported for that."""
    tree = ast.parse((ROOT / "lightning_muon" / "__init__.py").read_text(encoding="utf-8"))
    values = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    return ast.literal_eval(values["__all__"])


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Docstrings name things as Sphinx does."""
    for paragraph in _PARAGRAPH.findall(html):
        if _LOST.search(_CODE.sub("", paragraph)):
            log.warning("%s: a list or a table is shown as text: %.200s", page.file.src_uri, paragraph)
    return _ROLE.sub("", html).replace("::</p>", ":</p>")


def on_nav(nav: Any, *, config: Any, **_: Any) -> Any:
    """Compare the pages with docs/llms.txt."""
    listed = (Path(config.docs_dir) / "llms.txt").read_text(encoding="utf-8")
    for page in nav.pages:
        if f"/docs/{page.file.src_uri})" not in listed:
            log.warning("docs/llms.txt does not list %s", page.file.src_uri)
    return nav
