import json
from pathlib import Path

import pytest

from recipes.t5_summarization.docstrings import (
    Pair,
    PairFilter,
    cache_file,
    harvest,
    in_validation,
    load_pairs,
    split_docstring,
)

BODY = "The body explains at some length what the function does and why."

MODULE = f'''"""Module that holds things.

{BODY} Once.
"""


class Box:
    """A box that is empty
    when it is made.

    {BODY} Twice.

    Args:
        size: Of the box.
    """

    def open(self):
        """Open the box again.

        {BODY}   Three
        times.
        """

    async def close(self):
        """Close it.

        {BODY} Two words are too few.
        """


def no_body():
    """Return nothing at all."""
'''


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Two packages; a copied file, a repeated pair, a broken file, and folders that are left out."""
    root = tmp_path / "packages"
    files = {
        "first/module.py": MODULE,
        "second/copy.py": MODULE,
        "second/other.py": f'def f():\n    """OPEN the box again.\n\n    {BODY} Other body.\n    """\n'
        f'def g():\n    """Shut the lid quietly.\n\n    {BODY} Three times.\n    """\n'
        f'def h():\n    """Keep this other pair.\n\n    {BODY} Four times.\n    """\n',
        "second/broken.py": "def f(:\n",
        "second/nul.py": "x = '\0'\n",
        "second/tests/test_module.py": f'"""A docstring of a test.\n\n{BODY} Five times.\n"""\n',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "second/latin.py").write_bytes(b'"""A file that is \xe9 no UTF-8.\n\n' + BODY.encode() + b'"""\n')
    return root


EXPECTED = [
    Pair(module="packages/first/module.py", source=f"{BODY} Once.", target="Module that holds things."),
    Pair(
        module="packages/first/module.py",
        source=f"{BODY} Twice. Args: size: Of the box.",
        target="A box that is empty when it is made.",
    ),
    Pair(module="packages/first/module.py", source=f"{BODY} Three times.", target="Open the box again."),
    Pair(module="packages/second/other.py", source=f"{BODY} Four times.", target="Keep this other pair."),
]


def test_each_pair_is_found_once_also_in_the_cache(packages: Path, tmp_path: Path) -> None:
    # second/other.py repeats a target (case ignored) in f and a source in g.
    assert harvest([packages], PairFilter(), num_workers=1) == EXPECTED
    cache = tmp_path / "cache"
    assert load_pairs(cache, [packages]) == EXPECTED
    path = cache_file(cache, [packages], PairFilter())
    assert [Pair(**json.loads(line)) for line in path.read_text().splitlines()] == EXPECTED
    path.write_text(path.read_text().splitlines()[0] + "\n")
    assert load_pairs(cache, [packages]) == EXPECTED[:1], "the second call must read the cache"
    assert sorted(cache.iterdir()) == [path], "no temporary file may stay"


def test_docstrings_without_summary_or_body_are_rejected() -> None:
    summaries = ("Two words.", "word " * 26, "f(x, y, *args, **kwargs) -> (z, w)", ":param x: a field list first",
                 "Une phrase qui a \u00e9t\u00e9 \u00e9crite ailleurs")  # fmt: skip
    docstrings = [f"{summary}\n\n{BODY}" for summary in summaries]
    docstrings += ["A summary with a short body.\n\nShort.", "A summary with no body, of more than forty characters."]
    assert [split_docstring(docstring, PairFilter()) for docstring in docstrings] == [None] * 7


def test_the_share_of_validation_modules_is_the_one_asked_for() -> None:
    modules = [f"site-packages/package/module_{i}.py" for i in range(2000)]
    first, second = ([in_validation(module, 0.2, seed) for module in modules] for seed in (0, 1))
    assert first == [in_validation(module, 0.2, 0) for module in modules]
    assert first != second
    # Binomial(2000, 0.2) has a standard deviation of 18; the hash is fixed, so this cannot flicker.
    assert abs(sum(first) - 400) < 72
