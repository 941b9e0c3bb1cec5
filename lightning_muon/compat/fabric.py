"""Private names of Lightning Fabric for the Fabric strategy; tests/unit/compat/test_fabric.py fails when one moves.

What the strategies of the Trainer use as well is in :mod:`lightning_muon.compat.lightning`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn


def set_no_backward_sync(strategy: Any, no_sync: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    """Make ``no_sync`` what ``fabric.no_backward_sync(model)`` enters, with what ``setup_module`` has returned.

    Sets ``Strategy._backward_sync_control``, an object with ``no_backward_sync(module, enabled)`` (2.6).
    """
    strategy._backward_sync_control = _Control(no_sync)


class _Control:
    def __init__(self, no_sync: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
        self._no_sync = no_sync

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._no_sync(module) if enabled else nullcontext()
