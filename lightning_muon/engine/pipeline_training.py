"""Trains batches through the stages of a pipeline: what the engine does differently with one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_muon.comm.agreement import together
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.pipeline.options import PipelineOptions
from lightning_muon.pipeline.runtime import cut_once
from lightning_muon.sharding.base import ModeOptions, ShardingMode
from lightning_muon.sharding.tokens import TokenCount

GIVE_ALL = (
    "give it all parameters, frozen ones too, which it leaves as they are: AdamW(self.parameters()); or set "
    "pipeline_split so that each rank has something to train"
)


class PipelineTraining:
    """Trains the stages of this rank, for a :class:`~lightning_muon.engine.training.TrainingEngine`.

    The order of calls: :meth:`mode_options`; :meth:`take_calls` when the stages are sharded; :meth:`attach`; then
    :meth:`train` for each batch.

    Args:
        module: Loses the parts of other ranks. Construction is collective over ``mesh``; every rank must do it.
        options: How to cut it.
        mesh: All ranks, by (pipeline, replicate, shard).
    """

    _mode: ShardingMode

    def __init__(self, module: nn.Module, options: PipelineOptions, mesh: DeviceMesh) -> None:
        before = {name: p for name, p in module.named_parameters() if not isinstance(p, DTensor)}
        self.runtime = cut_once(module, options, mesh)
        self._module, self._mesh = module, mesh
        present = set(module.parameters())
        # Parameter of another stage -> its name.
        self._absent = WeakTensorKeyDictionary({p: name for name, p in before.items() if p not in present})
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._tokens: TokenCount | None = None
        self._is_nonfinite: Tensor | None = None  # Whether any stage has found a NaN or an Inf in this batch.

    def mode_options(self, options: ModeOptions) -> ModeOptions:
        """``options`` for a mode that shards the stages; local."""
        policy = options.mp_policy
        self.runtime.output_dtype = policy and policy.output_dtype
        return replace(
            options,
            # Parts send each other tensors in the dtype of their computation.
            mp_policy=policy and replace(policy, output_dtype=None),
            roots=self.runtime.modules,
            stages=self._mesh,
            # Whole weights stay from the first forward of a batch to the sum of the gradients.
            reshard_after_forward=False,
            reshard_after_backward=False,
        )

    def take_calls(self, mode: ShardingMode, run: Callable[[Any], Tensor]) -> None:
        """Let calls of the module run the stages that ``mode`` has sharded; local.

        ``run`` is the engine's method around :meth:`train`.
        """
        self._mode, runtime = mode, self.runtime
        mode.copies = runtime.copies()
        runtime.reduce = mode.reduce_part
        runtime.model.take_calls(runtime.forward)
        # The module keeps the runtime when the training is over.
        runtime.run_batch = weakref.WeakMethod(run)

    def require_parameters(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ``ValueError`` on all ranks if one of them has an optimizer without parameters.

        Collective over the stages.
        """

        def check() -> None:
            for optimizer in optimizers:
                if not any(group["params"] for group in optimizer.param_groups):
                    raise ValueError(f"{type(optimizer).__name__} has no parameter of a stage of this rank; {GIVE_ALL}")

        together(check, [self.runtime.group])

    def attach(self, optimizers: Sequence[torch.optim.Optimizer], tokens: TokenCount | None) -> None:
        """Train with these optimizers and this token count; local."""
        self._optimizers, self._tokens = optimizers, tokens

    def parameters_of_rank(
        self, parameters: Sequence[Tensor], current: Mapping[str, Tensor], replaced: Mapping[Tensor, str]
    ) -> list[Tensor]:
        """``parameters`` without those of other stages, and with the copies of them that this one has; local.

        ``current`` has the parameters of the module by name, ``replaced`` the names of those from before the sharding.
        """
        copies = self.runtime.copied_names
        names = {parameter: name for name, parameter in current.items()}
        chosen: dict[Tensor, None] = {}
        for parameter in parameters:
            name = self._absent.get(parameter)
            if name is None:
                chosen[parameter] = None
                name = replaced.get(parameter) or names.get(parameter)
            chosen |= dict.fromkeys(current[copy] for copy, first in copies.items() if first == name)
        return list(chosen)

    # ---- batches

    def train(self, batch: Any) -> Tensor:
        """Run forward, backward and the sum of gradients of a batch; return its mean loss.

        See :meth:`~lightning_muon.engine.training.TrainingEngine.run_pipeline`, which calls it. Collective over all
        ranks.
        """
        if self._tokens is not None:
            self._tokens.reset()
        self._mode.begin_forward()
        try:
            with self._mode.no_sync():
                loss, is_nonfinite = self.runtime.train(
                    batch, factor=self._gradient_factor, check=self._require_no_gradients
                )
        except BaseException:
            if self._tokens is not None:
                self._tokens.reset()
            self._mode.pass_failed()
            raise
        self._skip_step_if(is_nonfinite)
        return loss

    def _require_no_gradients(self) -> None:
        """Raise if an earlier batch has left gradients; local."""
        left = [name for name, parameter in self._module.named_parameters() if parameter.grad is not None]
        if left:
            raise RuntimeError(
                f"{left[0]} still has the gradient of an earlier batch; call zero_grad before each batch of a "
                "pipeline. Larger batches, and pipeline_microbatches, stand for accumulated gradients"
            )

    def _gradient_factor(self, num_losses: Tensor) -> Tensor:
        """Factor on the gradients of the sum of this rank's losses, before the mean over the ranks."""
        if self._tokens is None:
            return 1 / num_losses.clamp(min=1)
        if not self._tokens.is_summed:
            self._tokens.begin_micro_batch()
            self._tokens.report(num_losses)
        self._mode.set_gradient_divisor(self._tokens.divisor(1))
        return torch.ones_like(num_losses)

    def _skip_step_if(self, is_nonfinite: Tensor | None) -> None:
        """Let the optimizers skip the next step if this bool on the device, equal on all stages, is true; local."""
        self._is_nonfinite = is_nonfinite
        for optimizer in self._optimizers:
            if isinstance(optimizer, PlannedOptimizer):
                optimizer.nonfinite_elsewhere = is_nonfinite

    def skip_unless_finite(self, norm: Tensor) -> None:
        """Let the optimizers skip the next step also if this norm of the gradients is not finite; local."""
        if self._is_nonfinite is not None:
            self._skip_step_if(self._is_nonfinite | norm.isfinite().logical_not())
