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
from functools import partial
from pathlib import Path

from recipes.t5_summarization.files import write_atomically

log = logging.getLogger(__name__)

# Part of the cache's key: raise it when the rules below change what is harvested.
_RULES = 1
# Tests repeat the docstrings of what they test; the others hold no prose or belong to another interpreter.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "__pycache__", "site-packages", "dist-packages"})
_MAX_FILE_BYTES = 2_000_000
_FILES_PER_TASK = 64


@dataclass(frozen=True, kw_only=True)
class PairFilter:
    """Which docstrings become a pair.

    Args:
        min_target_words: A shorter summary line says too little.
        max_target_words: A longer one is no summary.
        min_source_chars: A shorter body leaves nothing to summarize.
        max_source_chars: The body is cut here; tokenizers cut it much earlier.
    """

    min_target_words: int = 3
    max_target_words: int = 25
    min_source_chars: int = 40
    max_source_chars: int = 4000

    def __post_init__(self) -> None:
        if not 1 <= self.min_target_words <= self.max_target_words:
            raise ValueError(
                f"PairFilter needs 1 <= min_target_words <= max_target_words, got {self.min_target_words} "
                f"and {self.max_target_words}"
            )


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One docstring.

    Args:
        module: File it stands in, as root folder's name / path below it, e.g. ``"site-packages/torch/optim/adam.py"``.
        source: The body, white space normalized.
        target: The summary line: the first line, with the lines that it wraps onto.
    """

    module: str
    source: str
    target: str


def default_roots() -> list[Path]:
    """The folders of the standard library and of the installed packages of the running interpreter."""
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))


def split_docstring(docstring: str, rules: PairFilter) -> tuple[str, str] | None:
    """The (source, target) of one docstring, or None if the rules reject it.

    Args:
        docstring: As ``ast.get_docstring`` returns it, indentation removed.
        rules: Length limits.

    Returns:
        Both texts with every run of white space replaced by one space.
    """
    summary, _, body = docstring.partition("\n\n")
    target, source = " ".join(summary.split()), " ".join(body.split())[: rules.max_source_chars]
    num_words = len(target.split())
    if not rules.min_target_words <= num_words <= rules.max_target_words or len(source) < rules.min_source_chars:
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


def read_file(location: tuple[str, str], rules: PairFilter) -> tuple[str, list[Pair]]:
    """The SHA-256 and the pairs of one file; a file that Python cannot parse has none.

    Args:
        location: (path, name of the module in the pairs).
        rules: Which docstrings to take.
    """
    path, module = location
    content = Path(path).read_bytes()
    try:
        docstrings = list(docstrings_of(content.decode()))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        docstrings = []
    split = (split_docstring(docstring, rules) for docstring in docstrings)
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

    Any split of the result by module has no file, no source and no target in two parts.

    Args:
        files: (content hash, pairs) in a fixed order.
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


def harvest(roots: Sequence[Path], rules: PairFilter, num_workers: int = 2) -> list[Pair]:
    """De-duplicated pairs of all Python files below the roots, in the same order on every run.

    Args:
        roots: Folders to walk.
        rules: Which docstrings to take.
        num_workers: Processes; 1 stays in this one.
    """
    files = find_files(roots)
    if num_workers == 1:
        return remove_duplicates(read_file(location, rules) for location in files)
    # spawn: a fork of a process with gloo or OpenMP threads can inherit a locked lock.
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return remove_duplicates(pool.map(partial(read_file, rules=rules), files, chunksize=_FILES_PER_TASK))


def cache_file(cache_dir: Path, roots: Sequence[Path], rules: PairFilter) -> Path:
    """Where the pairs of this interpreter, these packages and these rules are kept."""
    installed = sorted(f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions())
    key = json.dumps([_RULES, sys.version, [str(root) for root in roots], asdict(rules), installed])
    return cache_dir / f"docstrings-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"


def load_pairs(cache_dir: Path, roots: Sequence[Path] | None = None, rules: PairFilter | None = None) -> list[Pair]:
    """The pairs, from the cache if they are there, else harvested and cached.

    Args:
        cache_dir: Created if missing.
        roots: Default: :func:`default_roots`.
        rules: Default: ``PairFilter()``.
    """
    roots, rules = roots or default_roots(), rules or PairFilter()
    path = cache_file(cache_dir, roots, rules)
    if not path.exists():
        log.info("Harvesting the docstrings of the installed packages into %s; it takes about half a minute.", path)
        _harvest_in_fresh_process(path, roots, rules)
    with path.open(encoding="utf-8") as lines:
        return [Pair(**json.loads(line)) for line in lines]


def _harvest_in_fresh_process(path: Path, roots: Sequence[Path], rules: PairFilter) -> None:
    """Write the pairs to ``path``.

    Worker processes import the main module again. In a process of its own that is this light file, not a training
    script, which takes seconds to import and may start a training.
    """
    order = {"path": str(path), "roots": [str(root) for root in roots], "rules": asdict(rules)}
    search_path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "recipes.t5_summarization.docstrings", json.dumps(order)],
        env={**os.environ, "PYTHONPATH": search_path.rstrip(os.pathsep)},
        check=True,
    )


def in_validation(module: str, share: float, seed: int) -> bool:
    """Whether a file belongs to the validation split: a hash of its name, so other packages do not matter."""
    digest = hashlib.sha256(f"{seed}:{module}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _main(order: str) -> None:
    request = json.loads(order)
    pairs = harvest([Path(root) for root in request["roots"]], PairFilter(**request["rules"]))
    write_atomically(Path(request["path"]), "".join(json.dumps(asdict(pair)) + "\n" for pair in pairs))


if __name__ == "__main__":
    _main(sys.argv[1])
