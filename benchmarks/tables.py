"""Tables that the pages of docs/ take as they are: Markdown, with the command and the commit under them."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def markdown(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *rows))


def origin(module: str) -> str:
    """How to measure again what ``module`` has printed, as a line for the page."""
    command = shlex.join(["python", "-m", module.removesuffix(".__main__"), *sys.argv[1:]])
    return f"\n`{command}`, commit {commit()}."


def commit() -> str:
    """Of the code that runs; says so if it has been changed since."""
    describe = ["git", "describe", "--always", "--exclude=*", "--abbrev=8", "--dirty= and changes"]
    try:
        return subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def parser_of(description: str | None, numbers: Mapping[str, float]) -> argparse.ArgumentParser:
    """A parser that shows the docstring of a program, with an option for each of the numbers and its default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default {value:g}")
    return parser
