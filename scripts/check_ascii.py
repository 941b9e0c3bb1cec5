"""Source, configuration and documents are ASCII, have no tabs but in the Makefile, and end with one newline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.source_files import CODE_FOLDERS, ROOT, report

SUFFIXES = {".cff", ".cfg", ".csv", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
OTHER_FOLDERS = ("tests", "docs", ".ci", ".github")
NAMES = {"Dockerfile", "Makefile", "run", ".dockerignore", ".gitignore"}


def check(name: str, content: bytes) -> Iterator[str]:
    """Complaints about one file, each with its line."""
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.isascii():
            yield f"{name}:{number} has a character that is not ASCII: {line.decode(errors='replace').strip()!r}"
        if b"\t" in line and name != "Makefile":
            yield f"{name}:{number} has a tab"
    if content and (not content.endswith(b"\n") or content.endswith(b"\n\n")):
        yield f"{name}: must end with one newline"


def text_files() -> Iterator[Path]:
    """Text files of the project, relative to its root: those in the root itself and in the folders it owns."""
    inside = (path for folder in (*CODE_FOLDERS, *OTHER_FOLDERS) for path in (ROOT / folder).rglob("*"))
    for path in sorted((*ROOT.iterdir(), *inside)):
        if (path.suffix in SUFFIXES or path.name in NAMES) and path.is_file():
            yield path.relative_to(ROOT)


def main() -> int:
    """Check all text files; 1 if there is a complaint."""
    complaints = [c for path in text_files() for c in check(path.as_posix(), (ROOT / path).read_bytes())]
    return report(complaints, "ASCII and line ends")


if __name__ == "__main__":
    sys.exit(main())
