"""Questions that all ranks must answer alike before any of them goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_muon.compat.torch import let_gloo_finish_at_exit

_Result = TypeVar("_Result")


def require_equal(lines: Sequence[tuple[str, str]], group: dist.ProcessGroup | None, what: str) -> None:
    """Raise ``RuntimeError`` on every rank unless all hold the same lines, for example names and shapes.

    Collective over ``group``; every rank must call it.
    """
    # The lines travel only if there is a difference.
    digest = hashlib.sha256(repr(list(lines)).encode()).hexdigest()
    if len(set(gather(digest, group))) == 1:
        return
    first, *others = gather(list(lines), group)
    for rank, other in enumerate(others, start=1):
        for line, its_line in zip_longest(first, other):
            if line != its_line:
                raise RuntimeError(
                    f"{what} differs between ranks: rank 0 of the group has {_format(line)}, rank {rank} has "
                    f"{_format(its_line)}. Build it identically on every rank."
                )


def gather(value: _Result, group: dist.ProcessGroup | None) -> list[_Result]:
    """The ``value`` of every rank, in the order of the ranks. Collective over ``group``; every rank must call it.

    ``None`` is the default group; without an initialized process group there is one rank.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    let_gloo_finish_at_exit()
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def fail_together(error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if any rank brings an ``error``; a rank's own error keeps its type.

    Collective over ``group``; every rank must call it.
    """
    messages = gather(None if error is None else f"{type(error).__name__}: {error}", group)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"rank {rank} of the group failed, so all ranks stop: {message}")


def together(action: Callable[[], _Result], group: dist.ProcessGroup | None = None) -> _Result:
    """Run ``action``; if it fails on any rank, all raise. Collective over ``group``; every rank must call it."""
    error: Exception | None = None
    results: list[_Result] = []
    try:
        results.append(action())
    except Exception as problem:  # Also unpickling, which runs code of any kind.
        error = problem
    fail_together(error, group)
    return results[0]


def on_first_rank(action: Callable[[], Any]) -> None:
    """Run ``action`` on rank 0 and wait for it. Collective over all ranks; every rank must call it."""
    together(action if dist.get_rank() == 0 else lambda: None)


def _format(line: tuple[str, str] | None) -> str:
    return "nothing more" if line is None else f"{line[0]!r} {line[1]}"
