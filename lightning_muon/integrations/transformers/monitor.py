"""The callback ``MuonMonitor`` of a ``transformers.Trainer``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from lightning_muon.monitor.step_monitor import StepMonitor


class MuonMonitor(TrainerCallback):
    """Measures every n-th optimizer step of a ``Trainer``, and logs what it found with the Trainer's ``log``.

    docs/monitor.md says what each number means. ``TrainingArguments(include_num_input_tokens_seen="all")`` makes
    the Trainer count tokens; throughput and FLOPs of the model need it. Files for ``lightning-muon report`` are written
    to ``muon_monitor/`` in ``output_dir``.

    Args:
        trainer: The Trainer that gets the callback.
        every_n_steps: Measure every so many optimizer steps.
        flops_per_token: FLOPs of forward and backward for a token; 0 takes 6 for each weight that is multiplied.
        peak_flops: FLOP/s of a device for ``mfu/``; 0 leaves that out.

    Example::

        trainer = Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=lightning_muon.hf.optimizer())
        trainer.add_callback(lightning_muon.hf.MuonMonitor(trainer))
    """

    def __init__(
        self, trainer: Any, every_n_steps: int = 50, *, flops_per_token: float = 0.0, peak_flops: float = 0.0
    ) -> None:
        self._trainer, self._every_n_steps = trainer, every_n_steps
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._monitor: StepMonitor | None = None
        self._tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:
        """Begin. Collective over all ranks; every rank must call it."""
        self._tokens = state.num_input_tokens_seen
        self._monitor = StepMonitor(
            of_trainer["optimizer"],
            of_trainer["model"],
            every_n_steps=self._every_n_steps,
            flops_per_token=self._flops_per_token,
            peak_flops=self._peak_flops,
            first_step=state.global_step,
            folder=args.output_dir,
        )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count tokens, which the Trainer has summed over the ranks; local."""
        if self._monitor is not None:
            new, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
            self._monitor.count(new / (dist.get_world_size() if dist.is_initialized() else 1))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log what the step has given, if it was measured."""
        if self._monitor is not None and (values := self._monitor.take()):
            should_log = control.should_log
            self._trainer.log(values)
            control.should_log = should_log  # Or the loss of this step would not be logged any more.

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Stop the clock, in an evaluation."""
        if self._monitor is not None:
            self._monitor.pause()

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Go on."""
        if self._monitor is not None:
            self._monitor.resume()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Measure no more."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
