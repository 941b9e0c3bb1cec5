"""The callback ``MuonMonitor``: logs what optimizer steps take and do."""

from __future__ import annotations

import math
from typing import Any

from lightning_muon.compat.lightning import forget_logged
from lightning_muon.config import check_whole, takes_options
from lightning_muon.monitor.step_monitor import StepMonitor


@takes_options()
class MuonMonitorCallback:
    """Measures every n-th optimizer step, and logs what it found: milliseconds by part, sizes of updates, bytes.

    docs/monitor.md says what each number means. They go to ``self.log_dict``, and so to every logger of the Trainer.
    Steps that are not measured cost nothing but a count. Works with any strategy; without one of ours, there are no
    parts of the step. Tokens per second and FLOPs are numbers of Lightning's ``ThroughputMonitor``.

    Its base classes are this one, and the ``Callback`` of one Lightning package.

    Args:
        every_n_steps: Measure every so many optimizer steps, rounded up to a multiple of ``log_every_n_steps`` of the
            Trainer, since it logs in those steps only.

    Raises:
        ValueError: For several optimizers, on every rank.

    Example::

        trainer = Trainer(strategy="parallel_muon", callbacks=[MuonMonitor()])
        trainer.fit(model)
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        check_whole("every_n_steps", every_n_steps, at_least=1)
        self.every_n_steps = every_n_steps
        self._monitor: StepMonitor | None = None
        self._logged: tuple[str, ...] = ()  # Names of numbers that a logger has just been given.

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin. Collective over all ranks."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"MuonMonitor measures the steps of one optimizer, and the model has {len(trainer.optimizers)}; make a "
                "lightning_muon.StepMonitor for each of them"
            )
        log_every = max(1, trainer.log_every_n_steps)
        every = math.ceil(self.every_n_steps / log_every) * log_every
        self._monitor = StepMonitor(trainer.optimizers[0], every_n_steps=every, first_step=trainer.global_step)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Let the Trainer forget what it has logged, or it would log it again in later steps."""
        if self._logged:
            forget_logged(trainer, self._logged)
            self._logged = ()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Log what the step has given, if it was measured; local."""
        if self._monitor is not None and (values := self._monitor.take()):
            module.log_dict(values, on_step=True, on_epoch=False)
            self._logged = tuple(values)

    def on_train_end(self, *_: Any) -> None:
        """Measure no more."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def on_exception(self, *_: Any) -> None:
        """Measure no more."""
        self.on_train_end()
