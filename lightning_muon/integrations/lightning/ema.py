"""The callback ``EMAWeights``: a moving average of the weights, of each rank's own shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_muon.compat.torch import free_unsharded
from lightning_muon.config import check_number, check_whole, takes_options
from lightning_muon.flexdemo.replicators import LocalSteps
from lightning_muon.params.layout import local_tensor

AVERAGE = "average_state_dict"  # Its key in a checkpoint.


@takes_options()
class EMAWeightsCallback:
    """Averages weights over the steps, each rank those that it holds: ``average = decay * average + (1 - decay) * w``.

    Validation sees the average, and the model has it after ``fit``. Checkpoints have the weights of the training, and
    the average beside them under ``average_state_dict``; a run on other ranks, or with another ``sharding``, goes on
    with both. Buffers, such as running statistics, are those of the training. As the ``EMAWeightAveraging`` of
    Lightning, which needs whole weights on every rank; not for pipelines and DiLoCo.

    Its base classes are this one, and the ``Callback`` of one Lightning package.

    Args:
        decay: Share of the average that stays.
        every_n_steps: Average after the first of every so many optimizer steps; at first the average is the weights.

    Raises:
        ValueError: For a wrong value, a pipeline, DiLoCo, or a strategy that is not of this package; on every rank.

    Example::

        trainer = Trainer(strategy="parallel_muon", callbacks=[EMAWeights(decay=0.999)])
        trainer.fit(model)
    """

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1) -> None:
        check_number("decay", decay)
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and less than 1, got {decay!r}")
        check_whole("every_n_steps", every_n_steps, at_least=1)
        self.decay, self.every_n_steps = decay, every_n_steps
        self.average: nn.Module | None = None  # Has the averages, under the names of the weights, during a fit.
        self._num_steps = self._num_averaged = 0
        self._global_step = 0  # As last seen; several optimizers make it grow by more than one.
        self._held: list[Tensor] = []  # This rank's parts of the weights, while the model has the average.

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Refuse what has no average of its own on every rank; local, alike on all ranks."""
        strategy = trainer.strategy
        if not hasattr(strategy, "load_average"):
            raise ValueError(
                f"EMAWeights averages what a rank of ParallelMuonStrategy holds; with {type(strategy).__name__} use "
                "EMAWeightAveraging of Lightning"
            )
        options = strategy.options
        if options.pipeline_size > 1:
            raise ValueError(f"EMAWeights does not go with pipeline_size={options.pipeline_size}; remove one of them")
        if options.sharding == "zero2" and trainer.precision == "bf16-true":
            raise ValueError(
                "EMAWeights averages the weights that all ranks have, which sharding='zero2' with precision='bf16-true'"
                " rounds in each step; use precision='bf16-mixed', or sharding='fsdp'"
            )
        if options.has_nodes and isinstance(options.config.replicator, LocalSteps):
            raise ValueError("EMAWeights does not go with DiLoCo, whose nodes have weights of their own; remove it")

    def on_fit_start(self, trainer: Any, module: nn.Module) -> None:
        """Begin with the average of the checkpoint, or without one. Collective over all ranks."""
        self.average = _like(module)
        if not trainer.strategy.load_average(self.average):
            self._num_steps = self._num_averaged = 0

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Count from here; local."""
        self._global_step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: nn.Module, *_: Any) -> None:
        """Average if the batch has ended a step; local."""
        has_stepped, self._global_step = trainer.global_step != self._global_step, trainer.global_step
        self._num_steps += has_stepped
        if not has_stepped or (self._num_steps - 1) % self.every_n_steps:
            return
        trainer.strategy.finish_parameters()
        for average, weight in self._pairs(module):
            average.lerp_(weight.to(average.dtype), 1 - self.decay if self._num_averaged else 1.0)
        self._num_averaged += 1

    def on_validation_epoch_start(self, trainer: Any, module: nn.Module) -> None:
        """Evaluate with the average; local."""
        self._show(trainer, module, is_shown=self._num_averaged > 0)

    def on_validation_epoch_end(self, trainer: Any, module: nn.Module) -> None:
        """Train on with the weights; local."""
        self._show(trainer, module, is_shown=False)

    def on_exception(self, trainer: Any, module: nn.Module, _: BaseException) -> None:
        """Let a checkpoint that is saved now have the weights; local."""
        self._show(trainer, module, is_shown=False)

    def on_fit_end(self, _: Any, module: nn.Module) -> None:
        """Leave the average in the model; local."""
        for average, weight in self._pairs(module) if self._num_averaged else ():
            weight.copy_(average)
        free_unsharded(module)
        self.average = None

    def on_save_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        """Save the average, too. Collective over all ranks."""
        if self._num_averaged and self.average is not None:
            checkpoint[AVERAGE] = trainer.strategy.average_to_save(self.average)

    def state_dict(self) -> dict[str, int]:
        """How often weights were averaged, and the number of steps."""
        return {"num_averaged": self._num_averaged, "num_steps": self._num_steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from :meth:`state_dict`."""
        self._num_averaged, self._num_steps = state_dict["num_averaged"], state_dict["num_steps"]

    def _show(self, trainer: Any, module: nn.Module, *, is_shown: bool) -> None:
        """Let the model have the average, or its weights again."""
        if is_shown == bool(self._held) or self.average is None:
            return
        trainer.strategy.finish_parameters()
        pairs = self._pairs(module)
        if is_shown:
            self._held = [weight.clone() for _, weight in pairs]
        for (average, weight), held in zip(pairs, self._held, strict=True):
            weight.copy_(average if is_shown else held)
        if not is_shown:
            self._held = []
        trainer.strategy.weights_have_changed()

    def _pairs(self, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """This rank's part of each average, and of the weight."""
        assert self.average is not None
        weights = dict(module.named_parameters())
        named = self.average.named_parameters()
        return [(local_tensor(each.detach()), local_tensor(weights[name].detach())) for name, each in named]


def _like(module: nn.Module) -> nn.Module:
    """A module with copies of the floating-point weights, of 32 bits at least, in the same places; local."""
    result = nn.Module()
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point():
            continue
        owner, (*path, attribute) = result, name.split(".")
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        # In 16 bits small steps towards the weights would be lost.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        average = parameter.detach().to(dtype, copy=True)
        owner.register_parameter(attribute, nn.Parameter(average, requires_grad=False))
    return result
