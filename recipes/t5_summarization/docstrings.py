"""Text that every machine has: (body -> summary line) pairs of the docstrings of installed Python packages.

Standard library only: the processes of the harvest import this file.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.t5_summarization.files import write_atomically

log = logging.getLogger(__name__)

# Part of the cache's key: raise it when the rules below change what is harvested.
_RULES = 2
# Tests repeat the docstrings of what they test; the others hold no prose or belong to another interpreter.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "__pycache__", "site-packages", "dist-packages"})
_MAX_FILE_BYTES = 2_000_000
_FILES_PER_TASK = 64
_TARGET_WORDS = range(3, 26)  # A shorter summary line says too little, a longer one is no summary.
_LEAST_SOURCE, _MOST_SOURCE = 40, 4000  # Characters of the body, which is cut there; tokenizers cut it much earlier.


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One docstring."""

    module: str  # File it stands in, as name of the root folder / path below: "site-packages/torch/optim/adam.py".
    source: str  # The body, white space normalized.
    target: str  # The summary line: the first line, with the lines that it wraps onto.


def default_roots() -> list[Path]:
    """The folders of the standard library and of the installed packages of the running interpreter."""
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))


def split_docstring(docstring: str) -> tuple[str, str] | None:
    """The (source, target) of a docstring, white space normalized; None if the rules reject it."""
    summary, _, body = docstring.partition("\n\n")
    target, source = " ".join(summary.split()), " ".join(body.split())[:_MOST_SOURCE]
    if len(target.split()) not in _TARGET_WORDS or len(source) < _LEAST_SOURCE:
        return None
    # Generated signatures ("f(x, y) -> z"), field lists and doctests are no sentences.
    num_plain = sum(letter.isalpha() or letter == " " for letter in target)
    is_sentence = target.isascii() and target[0].isalpha() and num_plain > 0.85 * len(target)
    return (source, target) if is_sentence else None


def docstrings_of(code: str) -> Iterator[str]:
    """Docstrings of the module, its classes and its functions, in the order of the syntax tree."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's files
        tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring


def read_file(location: tuple[str, str]) -> tuple[str, list[Pair]]:
    """The SHA-256 and the pairs of a file at (path, name of the module); one that Python cannot parse has none."""
    path, module = location
    content = Path(path).read_bytes()
    try:
        docstrings = list(docstrings_of(content.decode()))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        docstrings = []
    split = (split_docstring(docstring) for docstring in docstrings)
    pairs = [Pair(module=module, source=pair[0], target=pair[1]) for pair in split if pair]
    return hashlib.sha256(content).hexdigest(), pairs


def find_files(roots: Iterable[Path]) -> list[tuple[str, str]]:
    """(path, module name) of every Python file below the roots, sorted inside each root."""
    found: list[tuple[str, str]] = []
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            below = path.relative_to(root)
            if not _SKIPPED_FOLDERS.intersection(below.parts) and path.stat().st_size <= _MAX_FILE_BYTES:
                found.append((str(path), (root.name / below).as_posix()))
    return found


def remove_duplicates(files: Iterable[tuple[str, list[Pair]]]) -> list[Pair]:
    """Pairs of distinct files whose source and whose target both occur for the first time, case ignored.

    Any split of the result by module has no file, no source and no target in two parts. ``files`` are (hash, pairs).
    """
    hashes: set[str] = set()
    sources: set[str] = set()
    targets: set[str] = set()
    kept: list[Pair] = []
    for digest, pairs in files:
        if digest in hashes:
            continue
        hashes.add(digest)
        for pair in pairs:
            source, target = pair.source.casefold(), pair.target.casefold()
            if source not in sources and target not in targets:
                kept.append(pair)
            sources.add(source)
            targets.add(target)
    return kept


def harvest(roots: Sequence[Path]) -> list[Pair]:
    """De-duplicated pairs of all Python files below the roots, in the same order on every run."""
    files = find_files(roots)
    # spawn: a fork of a process with gloo or OpenMP threads can inherit a locked lock.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        return remove_duplicates(pool.map(read_file, files, chunksize=_FILES_PER_TASK))


def cache_file(cache_dir: Path, roots: Sequence[Path]) -> Path:
    """Where the pairs of this interpreter and these packages are kept."""
    installed = sorted(f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions())
    key = json.dumps([_RULES, sys.version, [str(root) for root in roots], installed])
    return cache_dir / f"docstrings-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"


def load_pairs(cache_dir: Path, roots: Sequence[Path] | None = None) -> list[Pair]:
    """The pairs below the roots, by default of all installed packages; cached when they are harvested first."""
    roots = roots or default_roots()
    path = cache_file(cache_dir, roots)
    if not path.exists():
        log.info("Harvesting the docstrings of the installed packages into %s; it takes about half a minute.", path)
        _harvest_in_fresh_process(path, roots)
    with path.open(encoding="utf-8") as lines:
        return [Pair(**json.loads(line)) for line in lines]


def _harvest_in_fresh_process(path: Path, roots: Sequence[Path]) -> None:
    """Write the pairs to ``path``.

    Worker processes import the main module again. In a process of its own that is this light file, not a training
    script, which takes seconds to import and may start a training.
    """
    search_path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "recipes.t5_summarization.docstrings", path, *roots],
        env={**os.environ, "PYTHONPATH": search_path.rstrip(os.pathsep)},
        check=True,
    )


def in_validation(module: str, share: float, seed: int) -> bool:
    """Whether a file belongs to the validation split: a hash of its name, so other packages do not matter."""
    digest = hashlib.sha256(f"{seed}:{module}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _main(path: str, *roots: str) -> None:
    pairs = harvest([Path(root) for root in roots])
    write_atomically(Path(path), "".join(json.dumps(asdict(pair)) + "\n" for pair in pairs))


if __name__ == "__main__":
    _main(*sys.argv[1:])
