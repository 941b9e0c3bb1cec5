"""What ``lightning-muon launch`` starts in each process: a script, in which ``accelerate.Accelerator`` is ours."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_muon.integrations.accelerate.hook import replace_accelerator


def main(words: Sequence[str] | None = None) -> None:
    """Run ``[-m] SCRIPT [arguments]`` as ``python`` itself would.

    Args:
        words: In place of those of the process.
    """
    words = list(sys.argv[1:] if words is None else words)
    is_module = words[:1] == ["-m"]
    if is_module:
        words = words[1:]
    if not words:
        raise SystemExit("usage: python -m lightning_muon.cli.run_script [-m] SCRIPT [arguments of SCRIPT]")
    replace_accelerator()
    sys.argv[:] = words
    if is_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    # In place of the current directory, which `python -m` has put there.
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
