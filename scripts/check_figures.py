"""How old the figures of the pages are: the commit that a section names, and how often its code has changed since.

Fails if a section of :data:`ROOMS` is not on its page, names no commit (of 8 digits) or one that is not in the history,
and if a section of docs/performance.md with a table is not in :data:`ROOMS`. Age is no failure: it is listed, by the
newest commit of each section. Nobody can measure all anew after each change, but whoever makes a room faster or slower
finds its sections here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

from scripts.source_files import ROOT, report

PERFORMANCE = "docs/performance.md"
# (Page, heading) -> folders of the package, or files, that the figures of the section measure.
ROOMS: Mapping[tuple[str, str], str] = {
    (PERFORMANCE, "The learning rate"): "math optim params",
    (PERFORMANCE, "Losses"): "math optim params",
    (PERFORMANCE, "Fine-tuning"): "math optim params",
    (PERFORMANCE, "One optimizer step"): "math schedule comm optim",
    (PERFORMANCE, "Methods of Newton-Schulz"): "math",
    (PERFORMANCE, "Python"): "params schedule optim",
    (PERFORMANCE, "Gradients"): "comm sharding optim",
    (PERFORMANCE, "Slow links"): "comm sharding optim flexdemo",
    (PERFORMANCE, "Losses with FlexDeMo"): "flexdemo optim",
    (PERFORMANCE, "With earlier code"): "flexdemo",
    (PERFORMANCE, "Pipelines"): "schedule/pipeline pipeline engine",
    (PERFORMANCE, "Prediction"): "schedule optim",
    (PERFORMANCE, "On cards"): "math comm sharding optim flexdemo",
    ("docs/checkpoints.md", "What was broken, and what happened"): "checkpoint engine monitor integrations",
    ("docs/checkpoints.md", "Saving while the training goes on"): "checkpoint",
    ("docs/checkpoints.md", "Damage is found before anything is loaded"): "checkpoint",
    ("docs/gradients.md", "A compiled model"): "sharding",
    ("docs/flexdemo.md", "Compared with DeToNATION"): "flexdemo",
}
# With a table of formulas.
WITHOUT_FIGURES = {"The floor"}


def sections(text: str) -> Iterator[tuple[str, str]]:
    """(heading, text up to the next heading of any level)."""
    parts = re.split(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), flags=re.M)
    yield from zip(parts[1::2], parts[2::2], strict=True)


def unlisted(page: str, text: str) -> Iterator[str]:
    """A complaint about each section with a table that :data:`ROOMS` does not know."""
    for heading, content in sections(text):
        if "| --- |" in content and (page, heading) not in ROOMS and heading not in WITHOUT_FIGURES:
            yield f"{page}, {heading}: a table, but ROOMS does not say what it measures"


def commits_of(text: str, heading: str) -> list[str] | None:
    """The commits that a section names; None if there is no such section."""
    found = [content for its, content in sections(text) if its == heading]
    return re.findall(r"\b[Cc]ommit\s+([0-9a-f]{8})\b", found[0]) if found else None


def git(*words: str) -> str | None:
    """What a command of git says; None if it fails, or if there is no git."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def age(commits: list[str], rooms: str) -> str:
    """The newest of the commits, and how many have changed the rooms since."""
    paths = [f"lightning_muon/{room}" for room in rooms.split()]
    since = {each: int(git("rev-list", "--count", f"{each}..HEAD", "--", *paths) or 0) for each in commits}
    newest = min(since, key=since.__getitem__)
    date = git("show", "-s", "--format=%cs", newest)
    return f"{newest} of {date}, {since[newest]} commits since in {', '.join(rooms.split())}"


def main() -> int:
    """List the ages; 1 if there is a complaint."""
    has_history = git("rev-parse", "--is-shallow-repository") == "false"
    complaints = list(unlisted(PERFORMANCE, (ROOT / PERFORMANCE).read_text(encoding="utf-8")))
    for (page, heading), rooms in ROOMS.items():
        path = ROOT / page
        commits = commits_of(path.read_text(encoding="utf-8"), heading) if path.exists() else None
        if not commits:
            complaints.append(f"{page}, {heading}: {'no such section' if commits is None else 'names no commit'}")
        elif has_history:
            unknown = {each for each in commits if git("merge-base", "--is-ancestor", each, "HEAD") is None}
            complaints += [f"{page}, {heading}: commit {each} is not in the history" for each in sorted(unknown)]
            if known := [each for each in commits if each not in unknown]:
                print(f"{page}, {heading}: {age(known, rooms)}")
    if not has_history:
        print("figures: no ages, since the clone has no history (git fetch --unshallow)")
    return report(complaints, "figures")


if __name__ == "__main__":
    sys.exit(main())
