"""The callback ``MuonMonitor``: logs what optimizer steps take and do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from lightning_muon.compat.lightning import LightningPackage, forget_logged
from lightning_muon.config import check_whole
from lightning_muon.integrations.strategy import MuonStrategy
from lightning_muon.monitor.step_monitor import StepMonitor, flops_of_token
from lightning_muon.sharding.outputs import tensors_in

_DTYPES = {"bf": torch.bfloat16, "16": torch.float16}


class MuonMonitorCallback:
    """Measures every n-th optimizer step, and logs what it found: milliseconds by part, sizes of updates, throughput.

    docs/monitor.md says what each number means. They go to ``self.log_dict``, and so to every logger of the Trainer. If
    there is one, files for ``lightning-muon report`` are written to ``muon_monitor/`` in its directory. Steps that are
    not measured cost nothing but a count. Works with any strategy; without one of ours, there are no parts of the step.

    Its base classes are this one, and the ``Callback`` of one Lightning package.

    Args:
        every_n_steps: Measure every so many optimizer steps, rounded up to a multiple of ``log_every_n_steps`` of the
            Trainer, since it logs in those steps only.
        tokens: Batch of a rank -> number of its tokens; without it the elements of ``batch["input_ids"]``, or of the
            first tensor of integers that has at least two dimensions, are counted.
        flops_per_token: FLOPs of forward and backward for a token; 0 takes 6 for each weight that is multiplied.
        peak_flops: FLOP/s of a device for ``mfu/``; ``"auto"`` is what Lightning knows of the GPU, 0 leaves it out.

    Raises:
        ValueError: For several optimizers, on every rank.

    Example::

        trainer = Trainer(strategy="parallel_muon", callbacks=[MuonMonitor()])
        trainer.fit(model)
    """

    package: LightningPackage

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        tokens: Callable[[Any], int] | None = None,
        flops_per_token: float = 0.0,
        peak_flops: float | Literal["auto"] = "auto",
    ) -> None:
        check_whole("every_n_steps", every_n_steps, at_least=1)
        if isinstance(peak_flops, str) and peak_flops != "auto":
            raise ValueError(f"MuonMonitor(peak_flops={peak_flops!r}): FLOP/s of a device, 0 or 'auto'")
        self.every_n_steps, self.tokens = every_n_steps, tokens or tokens_of
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self._monitor: StepMonitor | None = None
        self._logged: tuple[str, ...] = ()  # Names of numbers that a logger has just been given.

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin. Collective over all ranks; every rank must call it."""
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"MuonMonitor measures the steps of one optimizer, and the model has {len(trainer.optimizers)}; make a "
                "lightning_muon.StepMonitor for each of them"
            )
        (optimizer,) = trainer.optimizers
        log_every = max(1, trainer.log_every_n_steps)
        of_strategy: dict[str, Any] = {"flops_per_token": self.flops_per_token or flops_of_token(module)}
        if isinstance(trainer.strategy, MuonStrategy):
            engine = trainer.precision_plugin.engine
            of_strategy["data_copies"] = trainer.world_size // engine.meshes.num_data_ranks
            of_strategy["skipped_steps"] = lambda: engine.finite_check(optimizer).skipped_steps
            if not self.flops_per_token:  # The module of a rank is one of so many stages.
                of_strategy["flops_per_token"] *= trainer.strategy.options.pipeline_size
        self._monitor = StepMonitor(
            optimizer,
            every_n_steps=math.ceil(self.every_n_steps / log_every) * log_every,
            peak_flops=self._known_flops(trainer) if isinstance(self.peak_flops, str) else self.peak_flops,
            folder=trainer.log_dir if trainer.loggers else None,
            first_step=trainer.global_step,
            **of_strategy,
        )

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        """Count the tokens of the batch; local."""
        if self._logged:
            forget_logged(trainer, self._logged)
            self._logged = ()
        if self._monitor is not None:
            self._monitor.count(self.tokens(batch))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Log what the step has given, if it was measured; local."""
        if self._monitor is not None and (values := self._monitor.take()):
            module.log_dict(values, on_step=True, on_epoch=False)
            self._logged = tuple(values)

    def on_validation_start(self, *_: Any) -> None:
        """Stop the clock."""
        if self._monitor is not None:
            self._monitor.pause()

    def on_validation_end(self, *_: Any) -> None:
        """Go on."""
        if self._monitor is not None:
            self._monitor.resume()

    def on_train_end(self, *_: Any) -> None:
        """Measure no more."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None

    def on_exception(self, *_: Any) -> None:
        """Measure no more."""
        self.on_train_end()

    def _known_flops(self, trainer: Any) -> float:
        """FLOP/s of the device in the precision of the Trainer; 0 if Lightning does not know them."""
        dtype = next(
            (dtype for name, dtype in _DTYPES.items() if str(trainer.precision).startswith(name)), torch.float32
        )
        throughput = self.package.fabric("utilities.throughput")
        return throughput.get_available_flops(trainer.strategy.root_device, dtype) or 0.0


def tokens_of(batch: Any) -> int:
    """Elements of ``batch["input_ids"]``, or of the first tensor of integers with at least two dimensions; else 0."""
    if isinstance(batch, Mapping) and "input_ids" in batch:
        return batch["input_ids"].numel()
    is_text = (each for each in tensors_in(batch, set()) if each.ndim > 1 and not each.is_floating_point())
    return next((each.numel() for each in is_text), 0)
