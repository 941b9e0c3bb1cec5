"""Checks that all ranks agree before any of them goes on, and the one message of a step that carries them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from lightning_muon.comm.collectives import AxisGroup
from lightning_muon.compat.torch import let_gloo_finish_at_exit

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
_LATE = 30  # Seconds after which a rank says that it waits for others.
# Where code of a program is not.
_NOT_OF_USER = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), contextlib.__file__)


def require_equal(
    lines: Sequence[tuple[str, str]],
    ranks: AxisGroup | None,
    what: str,
    advice: str = "Build it identically on every rank.",
) -> None:
    """Raise on every rank unless all hold the same lines. Collective over ``ranks``."""
    # The lines are sent only if there is a difference.
    digest = hashlib.sha256(repr(list(lines)).encode()).hexdigest()
    if len(set(gather(digest, ranks))) == 1:
        return
    first, *others = gather(list(lines), ranks)
    for rank, other in enumerate(others, start=1):
        for line, its_line in zip_longest(first, other):
            if line != its_line:
                ours, its = ("nothing more" if each is None else f"{each[0]!r} {each[1]}" for each in (line, its_line))
                raise RuntimeError(
                    f"{what} differs between ranks: rank 0 of the group has {ours}, rank {rank} has {its}. {advice}"
                )


def gather(value: _Result, ranks: AxisGroup | None) -> list[_Result]:
    """The ``value`` of every rank, in the order of the ranks. Collective over ``ranks``.

    ``None`` is all ranks; without an initialized process group there is one.
    """
    num_ranks = ranks.size if ranks is not None else dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks == 1:
        return [value]
    let_gloo_finish_at_exit()
    gathered: list[Any] = [None] * num_ranks
    dist.all_gather_object(gathered, value, group=None if ranks is None else ranks.group)
    return gathered


def fail_together(error: Exception | None, ranks: AxisGroup | None) -> None:
    """Raise on every rank if any rank brings an ``error``; a rank's own error keeps its type.

    Collective over ``ranks``.
    """
    messages = gather(None if error is None else f"{type(error).__name__}: {error}", ranks)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"rank {rank} of the group failed, so all ranks stop: {message}")


def together(
    action: Callable[[], _Result],
    groups: Iterable[AxisGroup | None] = (None,),
    then: Callable[[_Result, AxisGroup | None], None] = lambda result, ranks: None,
) -> _Result:
    """Return what ``action`` returns; if it fails on any rank, or ``then`` after it in any of the groups, all raise.

    An error in one group reaches the ranks of the others through the groups that follow. Collective over each of
    ``groups``.
    """
    error: Exception | None = None
    results: list[_Result] = []
    try:
        results.append(action())
    except Exception as problem:  # Of any kind: unpickling, for example, runs any code.
        error = problem
    for ranks in groups:
        try:
            fail_together(error, ranks)
            then(results[0], ranks)
        except Exception as problem:
            error = error or problem
    if error is not None:
        raise error
    return results[0]


def on_first_rank(action: Callable[[], Any], everyone: AxisGroup | None = None) -> None:
    """Run ``action`` on rank 0 and wait for it. Collective over all ranks.

    ``everyone`` is a group of all ranks to agree over, in place of the default one.
    """
    together(action if dist.get_rank() == 0 else lambda: None, (everyone,))


def missing_at(store: dist.Store, keys: Sequence[str], seconds: float) -> list[str]:
    """The ``keys`` that no rank has set within so many seconds; local."""
    deadline = time.monotonic() + seconds
    # Not store.wait(), during which no other thread of this process can use the store.
    while not store.check(list(keys)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [key for key in keys if not store.check([key])]


def warn_on_first_rank(text: str, *, stacklevel: int) -> None:
    """``warnings.warn`` on rank 0, or on the only rank, with a ``stacklevel`` that counts from the caller; local."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(text, stacklevel=stacklevel + 1)


@contextlib.contextmanager
def named_waits(*, late: bool) -> Iterator[None]:
    """Name the place in the error where other ranks never come; if ``late``, warn after a while of waiting, too. Local.

    :func:`maxima_over` warns by itself.
    """
    timer = threading.Timer(_LATE, _log.warning, (_waits(f"has waited for {_LATE} s"),)) if late else None
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        yield
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        raise RuntimeError(_waits("has waited until the timeout of the process group")) from error
    finally:
        if timer is not None:
            timer.cancel()


def await_all_ranks() -> None:
    """Wait for all ranks to make the same call of the program, with :func:`named_waits`. Collective over all ranks."""
    with named_waits(late=True):
        gather(None, None)


def _waits(how_long: str) -> str:
    """A sentence that names the rank, and the line of the program in which it waits for others; local."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_OF_USER):
        frame = frame.f_back
    rank, place = dist.get_rank() if dist.is_initialized() else 0, f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return (
        f"rank {rank} {how_long} for other ranks, at {place}. Every rank must make this call, as each step of the "
        "optimizer, outside of conditions such as `if rank == 0`"
    )


@dataclass(kw_only=True)
class Message:
    """int32 numbers that a rank sends to the others: each field is one, or a list equally long on all ranks."""

    def pack(self) -> list[int]:
        """All numbers, in the order of the fields."""
        numbers: list[int] = []
        for value in vars(self).values():
            numbers += value if isinstance(value, list) else [value]
        return numbers

    def unpack(self, numbers: Iterable[int]) -> Self:
        """A message of the same lengths, with other ``numbers``."""
        left = iter(numbers)
        own = vars(self).items()
        found = {name: list(islice(left, len(v))) if isinstance(v, list) else next(left) for name, v in own}
        return replace(self, **found)


def both_signs(words: Sequence[int]) -> list[int]:
    """The words and their negatives; from the maxima :func:`are_equal` tells whether all ranks have equal words."""
    return [*words, *(-word for word in words)]


def are_equal(maxima: Sequence[int]) -> bool:
    """Whether all ranks have sent :func:`both_signs` of the same numbers: then maxima equal minima."""
    half = len(maxima) // 2
    return all(most == -least for most, least in zip(maxima[:half], maxima[half:], strict=True))


def maxima_over(host: AxisGroup, numbers: Sequence[int]) -> list[int]:
    """The maximum over the ranks of each int32 number. Collective over ``host``."""
    if host.group is None or not numbers:
        return [int(number) for number in numbers]
    let_gloo_finish_at_exit()
    message = torch.tensor(numbers, dtype=torch.int32, device="cpu")
    work: Any = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=host.group, async_op=True)
    try:
        work.wait(timedelta(seconds=_LATE))
    except RuntimeError:
        if work.is_completed():  # It has failed.
            raise
        _log.warning(_waits(f"has waited for {_LATE} s"))
        work.wait()
    return message.tolist()
