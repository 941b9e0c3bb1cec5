"""What follows an exception in forward or backward that the program catches: FSDP2 is reset, on all ranks alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_muon.compat.torch import (
    collective_counts,
    default_store,
    has_unfinished_backward,
    has_unfinished_forward,
    is_in_backward,
)
from lightning_muon.sharding.fsdp_call_log import NO_WORD, NUM_WORDS, FsdpCallLog
from lightning_muon.sharding.fsdp_runtime import fsdp_modules, fsdp_roots, is_left_in_backward, reset_after_failure

_SECONDS_TO_FAIL_TOGETHER = 60.0
_POLL_SECONDS = 0.01


class Recovery:
    """Resets a model whose forward or backward has raised, and lets it go on only if that happened on all ranks.

    An exception that is told of (:meth:`failed`), or that leaves a forward of the model, resets it at once; one that
    nobody tells of, such as that of a bare ``loss.backward()``, before the next forward. What a failed forward leaves
    does no harm to gradients; a failed backward drops all of the step so far. Before this rank then communicates, it
    compares through the store whether all ranks have failed after the same communications. Local to construct.

    Args:
        module: A model with units.
        mesh: The ranks that train it together.
        call_log: The units that this rank runs; its hooks are called after those of this class.

    Attributes:
        gradients_dropped: Called when gradients have been dropped.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, call_log: FsdpCallLog) -> None:
        self._module, self._mesh, self._call_log = module, mesh, call_log
        self.gradients_dropped: Callable[[], None] | None = None
        self._roots = list(fsdp_roots(module))
        self._must_meet = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        for unit in fsdp_modules(module):
            self._watch(unit)

    def failed(self, *, in_backward: bool) -> None:
        """Reset the model after an exception; local. A second call for the same one changes nothing."""
        in_backward = in_backward or is_left_in_backward(self._roots)
        with suppress(RuntimeError):  # Of broken communication, which the exception itself tells of.
            reset_after_failure(self._module, drop_gradients=in_backward)
        if in_backward and self.gradients_dropped is not None:
            self.gradients_dropped()
        self._must_meet = True

    def resume(self) -> None:
        """Go on if all ranks have failed, and communicated the same before. Collective over the mesh after a failure.

        Every rank must call it before it communicates; without a failure it does nothing.

        Raises:
            RuntimeError: On every rank that has failed, if others have not, or have elsewhere.
        """
        if is_left_in_backward(self._roots):
            self.failed(in_backward=True)
        if not self._must_meet:
            return
        problem = self._compare()
        self._must_meet = False
        self._call_log.restart()
        if problem is not None:
            raise RuntimeError(
                f"forward or backward has raised on rank {dist.get_rank()}, and the program goes on, but {problem}. "
                "FSDP2 communicates in both, so ranks can only leave out the same batch together; resume from a "
                "checkpoint"
            )

    def close(self) -> None:
        """Remove the hooks, and leave shards, whatever has ended the run; local."""
        self.failed(in_backward=False)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _compare(self) -> str | None:
        """What other ranks have done instead, ``None`` if they have done the same."""
        ranks = self._call_log.ranks
        if len(ranks) == 1:
            return None
        # Ranks that have failed equally often meet; models and meshes do not matter.
        number = default_store().add(f"lightning_muon/failures of rank {dist.get_rank()}", 1)
        store = dist.PrefixStore(f"lightning_muon/failure {number}", default_store())
        of_all, of_shards = self._place()
        store.set(str(dist.get_rank()), f"{of_all} {of_shards}")
        deadline = time.monotonic() + _SECONDS_TO_FAIL_TOGETHER
        missing = [rank for rank in ranks if not store.check([str(rank)])]
        while missing and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            missing = [rank for rank in missing if not store.check([str(rank)])]
        if missing:
            return f"not on rank {', '.join(map(str, missing))} within {_SECONDS_TO_FAIL_TOGETHER:g} s"
        others = [
            rank
            for rank in ranks
            if not store.get(str(rank)).decode().startswith(of_all)
            or (rank in self._call_log.shard_ranks and not store.get(str(rank)).decode().endswith(of_shards))
        ]
        return f"at another place on rank {', '.join(map(str, others))}" if others else None

    def _place(self) -> tuple[str, str]:
        """What all ranks, and what the ranks of a shard group, must have communicated alike until now."""
        counts = collective_counts()
        *replicas, shards = (counts.get(self._mesh.get_group(axis).group_name) for axis in range(self._mesh.ndim))
        words = self._call_log.words()
        own = [word for word in words[NUM_WORDS:] if word != NO_WORD]
        return f"{words[:NUM_WORDS]} {replicas}", f"{own} {shards}"

    def _watch(self, unit: FSDPModule) -> None:
        def enter(*_: Any) -> None:
            if self._must_meet or (has_unfinished_backward(unit) and not is_in_backward()):
                self.resume()

        def leave(*_: Any) -> None:
            if has_unfinished_forward(unit):
                self.failed(in_backward=False)

        # Before the call is logged and FSDP2 gathers; and after FSDP2, also if forward has raised.
        before, after = map(torch.compiler.disable, (enter, leave))
        self._hooks.append(unit.register_forward_pre_hook(before, prepend=True))  # type: ignore[attr-defined]
        self._hooks.append(unit.register_forward_hook(after, always_call=True))  # type: ignore[attr-defined]
