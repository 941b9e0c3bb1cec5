"""Saves while the training goes on: a thread writes a copy of the state in host memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.torch_version import TorchVersion

from lightning_muon.comm.agreement import fail_together, together
from lightning_muon.comm.groups import AxisGroup

THREAD = "lightning_muon_save"
_log = logging.getLogger(__name__)


class BackgroundSaves:
    """Writes checkpoints in a thread, one at a time, which communicates with other ranks' threads over ``ranks``.

    ``ranks`` are all ranks with a process group of its own, since the training goes on over others. An error
    of a thread is raised on all ranks by the next :meth:`start` or :meth:`finish`, and logged at once. The thread keeps
    the process alive until its checkpoint is written.
    """

    def __init__(self, ranks: AxisGroup) -> None:
        self._ranks, has_card = ranks, torch.accelerator.is_available()
        self._options = StagingOptions(
            use_pinned_memory=has_card,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=has_card,
        )
        self._stager = DefaultStager(self._options)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._afterwards: list[Callable[[], None]] | None = None  # `None` when nothing is being written.

    def start(self, path: Path, state: Any, write: Callable[[Any, AxisGroup], None]) -> None:
        """Call ``write`` in a thread with a copy of ``state``, after the save that runs; ``path`` is for errors.

        ``write`` is collective over the ranks that it is given, and fails on all of them or on none. Collective over
        all ranks.
        """
        self.finish()
        is_agreed = threading.Event()

        def start() -> threading.Thread:
            arguments = path, partial(write, self._copied(state), self._ranks), is_agreed
            thread = threading.Thread(target=self._run, args=arguments, name=THREAD)
            thread.start()
            return thread

        try:
            thread = together(start, (self._ranks,))
            self._thread, self._afterwards = thread, []
        finally:
            is_agreed.set()

    def _copied(self, state: Any) -> Any:
        """A copy in host memory; from torch 2.13 on in that of the last copy."""
        if TorchVersion(torch.__version__) < "2.13":  # Such a stager makes one copy.
            self._stager = DefaultStager(self._options)
        return self._stager.stage(state)

    def after_commit(self, action: Callable[[], None]) -> None:
        """Call ``action`` when the running save has succeeded; at once, if there is none. Local."""
        with self._lock:
            if self._afterwards is not None:
                self._afterwards.append(action)
                return
        if self._error is None:
            action()

    def finish(self) -> None:
        """Wait until all is written; raise if it has failed. Collective over all ranks."""
        if self._thread is None:
            return
        self._thread.join()
        error, self._thread, self._error = self._error, None, None
        if error is not None and not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {error}")
        fail_together(error, self._ranks)

    def give_up(self) -> None:
        """Wait for the running save, without raising its error, which is logged; for a run that has failed. Local."""
        if self._thread is not None:
            self._thread.join()
        self._thread = self._error = None

    def _run(self, path: Path, write: Callable[[], None], is_agreed: threading.Event) -> None:
        """Body of the thread."""
        is_agreed.wait()
        if self._thread is not threading.current_thread():  # Another rank could not start its own.
            return
        what = f"{path} could not be written"
        try:
            write()
            what = f"{path} was written, but a checkpoint before it could not be removed"
            while (action := self._next_action()) is not None:
                action()
        except BaseException as error:
            error.add_note(f"{what} beside the training (async_save=True).")
            self._error = error
            _log.error("%s: %s: %s", what, type(error).__name__, error)
            with self._lock:
                self._afterwards = None

    def _next_action(self) -> Callable[[], None] | None:
        with self._lock:
            if self._afterwards:
                return self._afterwards.pop(0)
            self._afterwards = None
            return None
