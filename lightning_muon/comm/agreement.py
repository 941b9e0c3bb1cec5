"""Questions that all ranks must answer alike before any of them goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_muon.compat.torch import let_gloo_finish_at_exit

_Result = TypeVar("_Result")


def require_equal(lines: Sequence[tuple[str, str]], group: dist.ProcessGroup | None, what: str) -> None:
    """Raise ``RuntimeError`` on every rank unless all ranks hold the same ``lines``.

    Collective over ``group``; every rank must call it. Only a digest travels unless there is a difference.

    Args:
        lines: ``(key, description)`` pairs, for example a parameter name and its shape.
        group: ``None`` is the default group. Without an initialized process group nothing is compared.
        what: Subject of the error message, for example ``"the model"``.
    """
    if not _is_distributed(group):
        return
    digest = hashlib.sha256(repr(list(lines)).encode()).hexdigest()
    if len(set(_all_gather_object(digest, group))) == 1:
        return
    gathered: list[Sequence[tuple[str, str]]] = _all_gather_object(list(lines), group)
    raise RuntimeError(_first_difference(gathered, what))


def gather(value: _Result, group: dist.ProcessGroup | None) -> list[_Result]:
    """The ``value`` of every rank, in the order of the ranks. Collective over ``group``; every rank must call it.

    ``None`` is the default group; without an initialized process group there is one rank.
    """
    return _all_gather_object(value, group) if _is_distributed(group) else [value]


def fail_together(error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if any rank brings an ``error``; a rank's own error keeps its type.

    Collective over ``group``; every rank must call it.
    """
    if not _is_distributed(group):
        if error is not None:
            raise error
        return
    messages: list[str | None] = _all_gather_object(None if error is None else _describe(error), group)
    if error is not None:
        raise error
    failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
    if failed:
        rank, message = failed[0]
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


def _is_distributed(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _all_gather_object(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    let_gloo_finish_at_exit()
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _first_difference(gathered: Sequence[Sequence[tuple[str, str]]], what: str) -> str:
    """Name the first line in which a rank differs from rank 0 of the group."""
    first = gathered[0]
    for rank, other in enumerate(gathered[1:], start=1):
        for index in range(max(len(first), len(other))):
            mine = first[index] if index < len(first) else None
            theirs = other[index] if index < len(other) else None
            if mine != theirs:
                return (
                    f"{what} differs between ranks: rank 0 of the group has {_format(mine)}, rank {rank} has "
                    f"{_format(theirs)}. Build it identically on every rank."
                )
    raise AssertionError("digests differ but the lines do not")


def _format(line: tuple[str, str] | None) -> str:
    return "nothing more" if line is None else f"{line[0]!r} {line[1]}"
