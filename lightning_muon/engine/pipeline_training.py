"""Trains batches through the stages of a pipeline: what the engine does differently with one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_muon.comm.agreement import together
from lightning_muon.comm.collectives import start_reading
from lightning_muon.comm.groups import axis_group
from lightning_muon.compat.torch import free_unsharded
from lightning_muon.grad_sync.token_count import TokenCount
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.params.layout import local_tensor
from lightning_muon.pipeline.options import PipelineOptions
from lightning_muon.pipeline.runtime import cut_once
from lightning_muon.sharding.base import ModeOptions, ShardingMode

GIVE_ALL = (
    "give it all parameters, frozen ones too, which it leaves as they are: AdamW(self.parameters()); or set "
    "pipeline_split so that each rank has something to train"
)


class PipelineTraining:
    """Trains the stages of this rank, for a :class:`~lightning_muon.engine.training.TrainingEngine`.

    The order of calls: :meth:`mode_options`; :meth:`take_calls` when the stages are sharded; :meth:`attach`; then
    :meth:`train` for each batch, or :meth:`loss_with_backward` where the loop calls backward itself.

    Args:
        module: Loses the parts of other ranks. Construction is collective over ``mesh``; every rank must do it.
        options: How to cut it.
        mesh: All ranks, by (pipeline, replicate, shard).
    """

    _mode: ShardingMode
    _run: Callable[[], Callable[[Any, Tensor | None], Tensor] | None]  # The engine's method around `train`.

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
        # Derivatives of losses: those being reduced over the ranks, and those being copied to the host.
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._reading: list[Callable[[], list[list[Any]]]] = []
        self._problem: Exception | None = None  # Of the current call: raised on all ranks.
        self._has_gradients = False  # Of earlier batches: before a batch on this rank, after it on any rank.

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

    def take_calls(self, mode: ShardingMode, run: Callable[[Any, Tensor | None], Tensor]) -> None:
        """Let calls of the module run the stages that ``mode`` has sharded; local.

        ``run`` is the engine's method around :meth:`train`.
        """
        self._mode, runtime = mode, self.runtime
        mode.copies = runtime.copies()
        runtime.reduce = mode.reduce_part
        runtime.model.take_calls(runtime.forward)
        # The module keeps the runtime when the training is over.
        runtime.run_batch = self._run = weakref.WeakMethod(run)
        runtime.loss_of_batch = weakref.WeakMethod(self.loss_with_backward)

    def require_parameters(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ``ValueError`` on all ranks if one of them has an optimizer without parameters.

        Collective over the stages; every rank must call it.
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

    def train(self, batch: Any, num_losses: Tensor | None) -> Tensor:
        """Run forward, backward and the sum of gradients of a batch; return its mean loss.

        See :meth:`~lightning_muon.engine.training.TrainingEngine.run_pipeline`, which calls it. Collective over all
        ranks; every rank must call it.
        """
        if self._tokens is not None:
            self._tokens.reset()
        self._mode.begin_forward()
        try:
            with self._mode.no_sync():
                result = self.runtime.train(
                    batch,
                    factor=partial(self._gradient_factor, num_losses),
                    check=self._require_no_gradients,
                    has_gradients=self._has_gradients,
                )
        except BaseException:
            if self._tokens is not None:
                self._tokens.reset()
            self._mode.backward_failed()
            for parameter in self._module.parameters():
                parameter.grad = None
            raise
        self._has_gradients = result.has_gradients
        self._skip_step_if(result.is_nonfinite)
        return result.mean if num_losses is None else result.total / num_losses

    def _require_no_gradients(self) -> None:
        """Raise the problem of this call, if any, or if an earlier batch has left gradients; local."""
        if self._problem is not None:
            raise self._problem
        left = [name for name, parameter in self._module.named_parameters() if parameter.grad is not None]
        if left:
            raise RuntimeError(
                f"{left[0]} still has the gradient of an earlier batch; call zero_grad before each batch of a "
                "pipeline. Larger batches, and pipeline_microbatches, stand for accumulated gradients"
            )

    def _gradient_factor(self, wanted: Tensor | None, num_losses: Tensor) -> Tensor:
        """Factor on the gradients of the sum of this rank's losses, before the mean over the ranks."""
        if wanted is not None:
            return 1 / wanted.to(num_losses)
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

    # ---- losses with a backward

    def loss_with_backward(self, batch: Any, num_losses: Tensor | None) -> Tensor:
        """Return the loss of a batch; the backward of what the program computes from it adds the gradients.

        They are computed here. Backward multiplies them by the derivative with respect to the loss, which must be the
        same on all ranks, and adds them to ``p.grad``. Collective over all ranks; every rank must call it.
        """
        run = self._run()
        assert run is not None, "the runtime asks only while it trains"
        free_unsharded(self._module)
        before = {p: p.grad for p in self._module.parameters() if p.requires_grad}
        has_gradients = self._has_gradients = any(gradient is not None for gradient in before.values())
        self._problem = None
        if self._tokens is not None and (num_losses is not None or has_gradients):
            self._problem = RuntimeError(
                "loss_scaling='tokens' divides by the tokens of one batch of a pipeline; take larger batches, and "
                "pipeline_microbatches, instead of accumulated gradients, and no num_items_in_batch"
            )
        earlier = self._is_nonfinite
        for parameter in before:
            parameter.grad = None
        try:
            loss = run(batch, num_losses)
        finally:
            self._problem = None
        self.compare_derivatives()
        computed = [(p, p.grad) for p in before if p.grad is not None]
        for parameter, gradient in before.items():
            parameter.grad = gradient
        is_nonfinite = self._is_nonfinite
        assert is_nonfinite is not None, "run has looked"
        add = partial(self._add_gradients, computed, is_nonfinite)
        # If the batch was left out, there are no gradients. A rank of a frozen stage, without any, acts as the others.
        self._skip_step_if(earlier if self._has_gradients else None)
        self._has_gradients = False
        return _Loss.apply(torch.ones((), requires_grad=True), loss.float(), add)

    def _add_gradients(
        self, computed: Sequence[tuple[nn.Parameter, Tensor]], is_nonfinite: Tensor, derivative: Tensor
    ) -> None:
        """Add gradients that were computed with a loss. Collective over all ranks; every rank must call it."""
        self._skip_step_if(is_nonfinite if self._is_nonfinite is None else self._is_nonfinite | is_nonfinite)
        for parameter, gradient in computed:
            local_tensor(gradient).mul_(derivative)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        everyone = axis_group(self._mesh, (0, 1, 2))
        if everyone.group is not None:
            extremes = torch.stack([derivative, -derivative]).double().nan_to_num()
            work = dist.all_reduce(extremes, dist.ReduceOp.MAX, group=everyone.group, async_op=True)
            assert work is not None
            self._sent.append((work, extremes))

    def compare_derivatives(self, *, is_end: bool = False) -> None:
        """Raise ``RuntimeError`` on all ranks if they have multiplied the loss of an earlier batch by other numbers.

        Called after the next batch, when all ranks have sent theirs; on a GPU one batch later still, when the numbers
        are on the host. A check before the step would let every rank wait for the last backward, and for its device.
        With ``is_end`` all that is left is checked.
        """
        for work, extremes in self._sent:
            work.wait()
            self._reading.append(start_reading([extremes]))
            is_end |= extremes.device.type == "cpu"
        num_left = 0 if is_end else len(self._sent)
        self._sent.clear()
        while len(self._reading) > num_left:
            ((largest, negative),) = self._reading.pop(0)()
            if largest != -negative:
                raise RuntimeError(
                    f"backward of a pipeline with derivatives of the loss from {-negative:g} to {largest:g} on the "
                    "ranks, in a batch before; multiply it by the same number on all, or weigh batches with "
                    "loss_scaling='tokens'"
                )


class _Loss(torch.autograd.Function):
    """A loss whose gradients are known already: ``add`` takes the derivative with respect to it."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, loss: Tensor, add: Callable[[Tensor], None]) -> Tensor:
        ctx.add = add
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, derivative: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        if ctx.add is None:
            raise RuntimeError("backward a second time of one loss of a pipeline; call the model again")
        ctx.add, add = None, ctx.add
        add(derivative)
        return None, None, None
