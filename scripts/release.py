"""Prints the notes of a release, or what is missing for it: ``python -m scripts.release X.Y.Z``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from scripts.source_files import ROOT

# Where the version stands.
PLACES = {
    "pyproject.toml": r'^version = "(.+)"$',
    "lightning_muon/config.py": r'^VERSION = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
}


def disagreements(version: str) -> Iterator[str]:
    """The files that name another version."""
    for name, pattern in PLACES.items():
        found = re.findall(pattern, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        if found != [version]:
            yield f"{name} says {', '.join(found) or 'nothing'}, not {version}"


def notes(version: str, changelog: str) -> str:
    """The section of this version in the text of CHANGELOG.md; empty if there is none."""
    sections = re.split(r"^## \[(.+?)\].*\n", changelog, flags=re.MULTILINE)
    return dict(zip(sections[1::2], sections[2::2], strict=True)).get(version, "").strip()


def main() -> int:
    """Print the notes of the version that is named; 1 if it is no release."""
    version = sys.argv[1]
    complaints = list(disagreements(version))
    text = notes(version, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if not text:
        complaints.append(f"CHANGELOG.md has no section [{version}]; rename [Unreleased]")
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    if not complaints:
        print(text)
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
