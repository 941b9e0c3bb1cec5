"""A table of what is refused."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

NAN, INF = float("nan"), float("inf")


class Table(NamedTuple):
    """Rows of one call: (arguments, words of the message).

    Arguments are a dict of keywords, a tuple, or the only argument; words are a regular expression.
    """

    call: Callable[..., Any]
    rows: Sequence[tuple[Any, str]]
    error: Any = ValueError
