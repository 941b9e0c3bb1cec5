"""The callback ``MuonMonitor``: logs what optimizer steps take and do."""

from __future__ import annotations

from typing import Any

from lightning_muon.config import check_whole, takes_options
from lightning_muon.monitor.step_monitor import StepMonitor


@takes_options()
class MuonMonitorCallback:
    """Measures every n-th optimizer step, and logs what it found: milliseconds by part, sizes of updates, bytes.

    docs/monitor.md says what each number means. Every logger of the Trainer gets them. Steps that are not measured cost
    nothing but a count. Works with any strategy; without one of ours, there are no parts of the step. Tokens per second
    and FLOPs are numbers of Lightning's ``ThroughputMonitor``.

    Its base classes are this one, and the ``Callback`` of one Lightning package.

    Args:
        every_n_steps: Measure every so many optimizer steps.

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

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin. Collective over all ranks."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"MuonMonitor measures the steps of one optimizer, and the model has {len(trainer.optimizers)}; make a "
                "lightning_muon.StepMonitor for each of them"
            )
        first_step = trainer.global_step
        self._monitor = StepMonitor(trainer.optimizers[0], every_n_steps=self.every_n_steps, first_step=first_step)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Log what the step has given, if it was measured; local."""
        if self._monitor is not None and (values := self._monitor.take()):
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step - 1)  # As the Trainer counts what it logs.

    def on_train_end(self, *_: Any) -> None:
        """Measure no more."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    on_exception = on_train_end
