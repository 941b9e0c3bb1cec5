"""The life cycle of a training: what every framework asks for, from the unsharded module to the last step."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_muon.checkpoint.saving import BackgroundSaves, Format, Weights, fits_one_file, training_alone
from lightning_muon.comm.agreement import are_equal, both_signs, maxima_over, require_equal
from lightning_muon.comm.collectives import ALONE, AxisGroup, all_ranks, axis_group, host_group
from lightning_muon.compat.torch import free_unsharded, profiled
from lightning_muon.config import VERSION
from lightning_muon.engine.conversion import (
    OptimizerProxy,
    convert_optimizers,
    describe_optimizers,
    hand_back,
    optimizer_warnings,
    repoint_schedulers,
)
from lightning_muon.engine.mesh_sizes import Meshes
from lightning_muon.engine.model_setup import follow_calls, materialize, refuse_parts_of_weights
from lightning_muon.engine.options import Options
from lightning_muon.engine.replicas import ReplicaCheck
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.flexdemo.replicators import DiLoCo
from lightning_muon.monitor.watchdog import Watchdog
from lightning_muon.optim.gradients import skips_step
from lightning_muon.optim.parallel_muon import PlannedOptimizer, without_matrices
from lightning_muon.optim.parameters import compared
from lightning_muon.params.layout import parameters_of
from lightning_muon.pipeline.runtime import PipelineRuntime, cut_once
from lightning_muon.sharding.base import ModeOptions, broadcast_buffers, names_of
from lightning_muon.sharding.clipping import clip_value_
from lightning_muon.sharding.fsdp import Fsdp
from lightning_muon.sharding.guards import (
    CallLog,
    FailedPasses,
    Guard,
    SecondDerivatives,
    SingleReduction,
    WrittenWeights,
)
from lightning_muon.sharding.modes import Sharding, make_mode
from lightning_muon.sharding.shard_model import check_tensor_parallel
from lightning_muon.sharding.tokens import TokenCount


class TrainingEngine:
    """Shards one module, attaches its optimizers, and does what a step needs beside the user's code.

    A framework calls, in this order: :meth:`shard`; for a training :meth:`attach`; for each micro-batch
    :meth:`around_forward` and :meth:`around_backward`, all but the last of a step inside :meth:`no_sync`; clipping;
    :meth:`step`; around an evaluation :meth:`begin_evaluation` and :meth:`end_evaluation`; at last :meth:`end_training`
    and :meth:`close`. Methods are collective over the mesh unless they say that they are local.
    """

    def __init__(
        self,
        module: nn.Module,  # On any device; may be partly sharded, or sharded by an earlier training.
        options: Options,
        meshes: Meshes,
        *,
        mode_options: ModeOptions,  # `options.mode_options`, completed by what the run decides.
        info: Callable[[str], None],  # Takes lines for the log, on every rank.
        warn: Callable[[str], None],
        saves: BackgroundSaves | None = None,  # The background saves of this training, if any.
        watchdog: Watchdog | None = None,  # A watchdog that runs already; the engine closes it.
        tokens: TokenCount | None = None,  # The count of other models, for `loss_scaling="tokens"`.
        sharding: Sharding | None = None,  # Replaces `options.sharding`.
        is_only_module: bool = True,  # Whether every backward pass of the program goes through this module.
        is_loop_of_user: bool = True,  # Whether the user calls backward and step, maybe on the optimizers he has made.
        sees_every_backward: bool = True,  # Whether every backward pass is inside of `around_backward`.
    ) -> None:
        self.module, self.options, self.meshes = module, options, meshes
        self.mesh = meshes.data
        self.pipeline: PipelineRuntime | None = None
        if meshes.stages is not None:
            self.pipeline = cut_once(module, options, meshes.stages)
            mode_options = self.pipeline.mode_options(mode_options)
        self.mode = make_mode(sharding or options.sharding, self.mesh, mode_options)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.tokens = tokens
        if options.loss_scaling == "tokens" and tokens is None:
            self.tokens = TokenCount(axis_group(self.mesh, tuple(range(self.mesh.ndim))))
        self._is_guarded = False
        self._is_attached = False
        self.has_run = False  # Whether the module has run since the last step, so that there may be gradients.
        self._info, self._warn, self._saves = info, warn, saves
        self._is_only_module, self._is_loop_of_user = is_only_module, is_loop_of_user
        self._sees_every_backward = sees_every_backward
        self._replaced = WeakTensorKeyDictionary()  # Parameter from before the sharding -> its name.
        self.proxies: list[OptimizerProxy] = []  # For optimizers that were given and have been replaced.
        self._names: dict[Tensor, str] = {}
        self._watchdog = watchdog
        self._guards: list[Guard] = [] if watchdog is None else [watchdog]
        self._are_guards_on = False
        self._hooks = ExitStack()
        # Whether backward passes reduce gradients now, whether the last one did, and whether gradients are finished.
        self._is_last_micro_batch = self._is_reduced = True
        self._is_finished = False

    @property
    def _stage_group(self) -> AxisGroup:
        """The ranks with the other stages of a pipeline; this rank alone without one."""
        return ALONE if self.pipeline is None else self.pipeline.group

    # ---- before the first step

    def shard(self, device: torch.device) -> None:
        """Shard the module: give all ranks equal weights, in their final form on ``device``."""
        module = self.module
        versions = [("torch", torch.__version__), ("lightning_muon", VERSION)]
        of_run = [("sharding", self.mode.name), ("precision", repr(self.mode.options.mp_policy))]
        self.require_equal([*versions, *of_run, *self.options.lines], "the training")
        if self.meshes.tensor is not None:
            check_tensor_parallel(module, self.meshes.tensor)
        self._replaced.update({p: name for name, p in module.named_parameters() if not isinstance(p, DTensor)})
        free_unsharded(module)
        materialize(module, self.mode, device, self._warn)
        # Not earlier: `materialize` fails on DTensors with a weak reference.
        self._replaced.update({p: name for name, p in module.named_parameters() if isinstance(p, DTensor)})
        self.mode.prepare(module)
        for parameter in module.parameters():
            self._replaced.pop(parameter, None)  # Module.to fails on a parameter with a weak reference.
        module.to(device)
        if self.divides_weights:
            refuse_parts_of_weights(module)
        if self.pipeline is not None:
            self.pipeline.take_calls(self.mode, self.run_pipeline)
        self._switch_on_guards()

    def attach(
        self,
        given: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any] = (),
        *,
        source: str,
        is_default: bool = False,
    ) -> list[torch.optim.Optimizer]:
        """Train with these optimizers, too, and return those that replace them.

        They have the parameters that the module has, or had before :meth:`shard`. ``schedulers`` of a framework, which
        looks for their optimizers, follow them. ``source`` says in errors where they are from, ``is_default`` that the
        user did not make them.
        """
        module, options, before = self.module, self.options, self.optimizers
        given = [*before, *given]
        with self.guarded():
            for each in given:
                if isinstance(each, FlexDeMo):
                    each.forget_own_weights()
            self.rebind(given)
            if self.pipeline is not None:
                self.pipeline.require_parameters(given)
            choice = options.optimizer
            conversions = convert_optimizers(given, module, choice=choice, stages=self._stage_group)
            kinds = [(f"optimizer {index}", conversion.summary) for index, conversion in enumerate(conversions)]
            require_equal(kinds, None, source)
            self.optimizers = [conversion.optimizer for conversion in conversions]
            for old, new in zip(given, self.optimizers, strict=True):
                if new is not old:
                    if self._is_loop_of_user:  # The loop and its schedulers hold the given one.
                        self.proxies.append(OptimizerProxy(old, new))
                    else:
                        repoint_schedulers(schedulers, old, new)
                        self._hooks.callback(hand_back, schedulers, new, old, choice)

            if before:
                self._stop()  # A sharding mode is attached once, to all optimizers.
            self.mode.attach(module, self.optimizers)
            self._is_attached = True
            self._names = {parameter: name for name, parameter in names_of(module).items()}
            if self.pipeline is not None:
                self.pipeline.attach(self.optimizers, self.tokens)
            self._switch_on_guards()
            if self.tokens is not None and self.pipeline is None:
                parameters = [parameter for own in self.optimizers for parameter in parameters_of(own)]
                self._guards.append(SingleReduction(parameters, self.mode.layout.has_gradient, type(module).__name__))

        fresh = [each for each, optimizer in zip(conversions, given, strict=True) if optimizer not in before]
        self._info(describe_optimizers(fresh))
        for message in optimizer_warnings(fresh, choice, is_default=is_default):
            self._warn(message)
        return self.optimizers[len(before) :]

    def rebind(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Give optimizers the parameters that have replaced those from before :meth:`shard`; local."""
        current = dict(self.module.named_parameters())
        for optimizer in optimizers:
            is_fresh = isinstance(optimizer, PlannedOptimizer) and optimizer.is_fresh  # Its state can be made again.
            for group in optimizer.param_groups:
                if self.pipeline is not None:
                    group["params"] = self.pipeline.parameters_of_rank(group["params"], current, self._replaced)
                for index, parameter in enumerate(group["params"]):
                    name = self._replaced.get(parameter)
                    if name is None:
                        continue
                    if not is_fresh and parameter in optimizer.state:
                        raise ValueError(
                            f"{type(optimizer).__name__} has state for {name}, which was sharded since; create it anew"
                        )
                    group["params"][index] = current[name]

    def follow_forward(self) -> None:
        """Hook calls of the module, and backward passes from its outputs, for loops without a framework. Local."""
        # `generate` calls the module for each token; its weights stay whole between them.
        for handle in follow_calls(self.module, partial(self.around_forward, frees=False), self._backward_begins):
            self._hooks.enter_context(handle)

    def current(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        """``optimizer`` or its replacement, if it steps this module; else ``None``. Local."""
        used = next((proxy.used for proxy in self.proxies if proxy.given is optimizer), optimizer)
        return next((own for own in self.optimizers if own is used), None)

    # ---- micro-batches

    @contextmanager
    def around_forward(self, *, frees: bool = True) -> Generator[None]:
        """Context to enter around each forward pass of the module, and around each step of an evaluation.

        ``frees``: behind one without gradients, which no backward pass can follow, weights are shards again.
        """
        self.mode.begin_forward()
        has_grad = torch.is_grad_enabled()
        if has_grad:
            self.has_run = True
            self._is_finished = False
        with self.guarded():
            try:
                yield
                if frees and not has_grad:
                    free_unsharded(self.module)
            except BaseException:
                self.mode.pass_failed()
                raise

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Context in which backward leaves gradients unreduced; local."""
        self._require_optimizer("no_backward_sync (no_sync)")
        before, self._is_last_micro_batch = self._is_last_micro_batch, False
        try:
            with self.mode.no_sync():
                yield
        finally:
            self._is_last_micro_batch = before

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the next backward pass through this module reduces gradients; local."""
        return self._is_attached and self.has_run and self._is_last_micro_batch

    @property
    def is_accumulating(self) -> bool:
        """Whether the current micro-batch leaves gradients unreduced; local."""
        return self._is_attached and not self._is_last_micro_batch

    @contextmanager
    def around_backward(self, *, loss_divided_by: int = 1) -> Generator[None]:
        """Context to enter around each backward pass. Communicates in the last micro-batch, if the module has run.

        ``loss_divided_by`` is the number of micro-batches, if the framework divides each loss by it.
        """
        self.has_run |= self._is_only_module
        with self.guarded():
            try:
                self._begin_backward(loss_divided_by)
                yield
            except BaseException:
                if self.tokens is not None:
                    self.tokens.reset()
                self.mode.pass_failed()
                raise
            self.finish_backward()

    def run_pipeline(self, batch: Any) -> Tensor:
        """Run forward, backward and the sum of gradients of a batch through all stages; return its mean loss.

        The mean is that over the losses of the batch of this rank. Collective over all ranks. Gradients of the step
        before must be gone.
        """
        assert self.pipeline is not None, "a pipeline has pipeline_size of 2 or more"
        self.has_run, self._is_finished = True, False
        with self.guarded():
            loss = self.pipeline.train(batch)
            self.finish_backward()
        return loss

    def finish_backward(self) -> None:
        """Finish the reduction of gradients after a backward pass; :meth:`around_backward` calls it."""
        if not self._is_attached or not self.has_run:
            return
        self._is_reduced = self._is_last_micro_batch
        if self._is_last_micro_batch and not self._is_finished:
            self._reduce()
            self._is_finished = True

    def finish_gradients(self) -> None:
        """Finish the reduction of gradients before they are used, also after unannounced backward passes."""
        if not self._is_finished or not self._sees_every_backward:
            self._reduce()

    def _reduce(self) -> None:
        self.mode.finish_gradients()
        for guard in self._guards:
            guard.gradients_are_finished()

    # ---- the step

    def clip_by_norm(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of ``parameters``, the same on all ranks, by one norm; return the norm before."""
        if float(norm_type) != 2.0:
            raise ValueError(f"clip by norm_type=2.0: only the 2-norm is computed over all shards, got {norm_type}")
        with profiled("gradient_norm", "all"), self._clipping(parameters) as clipped:
            norm = self.mode.clip_norm_(clipped, max_norm)
            if self.pipeline is not None:
                self.pipeline.skip_unless_finite(norm)
        return norm

    def clip_by_value(self, parameters: Sequence[Tensor], max_value: float) -> None:
        """Clip the gradients of parameters element by element."""
        with self._clipping(parameters) as clipped:
            clip_value_(clipped, max_value, layout=self.mode.layout)

    @contextmanager
    def _clipping(self, parameters: Sequence[Tensor]) -> Generator[Sequence[Tensor]]:
        """Context in which whole gradients are clipped, of those parameters that it yields."""
        self._require_reduced("clip_gradients (clip_grad_norm_, clip_grad_value_)")
        with self.guarded():
            self.finish_gradients()
            for guard in self._guards:
                guard.clips()
            # Muon orthogonalizes, so the size of a gradient matters little to it.
            is_all = self.options.clip_groups == "all"
            yield parameters if is_all else without_matrices(parameters, self.optimizers)

    def step(
        self, optimizer: torch.optim.Optimizer, take_step: Callable[..., Any], closure: Callable[[], Any] | None = None
    ) -> Any:
        """Prepare and take a step; return what ``take_step(optimizer)`` returns, which also gets a ``closure``."""

        def with_whole_gradients() -> Any:
            result = None if closure is None else closure()
            self._require_reduced("optimizer.step")
            self.finish_gradients()
            for guard in self._guards:
                guard.steps()
            self._drop_nonfinite(optimizer)
            return result

        with self.guarded():
            if closure is None:
                with_whole_gradients()
                result = take_step(optimizer)
            else:
                result = take_step(optimizer, closure=with_whole_gradients)
            self.weights_have_changed()
            for guard in self._guards:
                guard.step_has_ended(optimizer)
        self.has_run = False
        return result

    # ---- weights that somebody reads

    def weights_have_changed(self) -> None:
        """Let the next forward gather the current weights; local."""
        free_unsharded(self.module)  # FSDP2 keeps those of its root after a forward that no backward has followed.

    def begin_evaluation(self, *, for_good: bool = False) -> None:
        """Switch to the running statistics of rank 0, as DDP does, and to weights that all nodes have in common.

        Each of them on the ranks that have the same modules; ``for_good`` if no training follows.
        """
        self.mode.finish_parameters()
        broadcast_buffers(self.module, None if self.pipeline is None else self.mesh)
        for optimizer in training_alone(self.optimizers):
            if optimizer.show_common_weights(for_good=for_good):
                self.weights_have_changed()

    def end_evaluation(self) -> None:
        """Switch back from averaged (DiLoCo) to this node's weights."""
        self.show_own_weights()
        self._compare_last_batch()
        for guard in self._guards:
            guard.evaluation_has_ended()

    def show_own_weights(self) -> None:
        """Undo what :meth:`begin_evaluation` has done to the weights; local."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, FlexDeMo) and optimizer.show_own_weights():
                self.weights_have_changed()

    def end_training(self) -> None:
        """Leave equal running statistics on all ranks, and weights that all nodes have in common."""
        self._compare_last_batch()
        for optimizer in training_alone(self.optimizers):
            way = optimizer.config.replicator
            if isinstance(way, DiLoCo) and (num_steps := optimizer.num_exchanges % way.period):
                self._warn(
                    f"DiLoCo: the weights lack what was learnt in the last {num_steps} steps; take a multiple of a "
                    "period"
                )
        self.begin_evaluation(for_good=True)

    def _compare_last_batch(self) -> None:
        if self.pipeline is not None:
            self.pipeline.context.batches.compare_last()

    @property
    def divides_weights(self) -> bool:
        """Whether a rank has some weights, or parts of them, only."""
        return self.mode.shards_weights or self.pipeline is not None

    @cached_property
    def saves_one_file(self) -> bool:
        """Whether checkpoints are single files, which the log says once; local, alike on all ranks."""
        choice = self.options.save_distributed_checkpoint
        is_small = choice == "auto" and self.pipeline is None
        if is_small:  # States are momenta of all nodes, or moments of AdamW.
            is_small = fits_one_file(self.module, self.mesh.size(0) if self.options.has_nodes else 2)
        kind = "single files" if is_small else "directories of shards, of which lightning-muon convert makes files"
        if choice is not False:
            self._info(f"Checkpoints are {kind} (save_distributed_checkpoint={choice!r}).")
        return choice is False or is_small

    @property
    def weights(self) -> Weights:
        """The part of a checkpoint that has the weights; local."""
        return Weights(self.module, self.mesh, self.optimizers)

    def format(self, *, whole: bool, metadata_name: str | None = None, **about: Any) -> Format:
        """How a checkpoint of this training is written, and what it says ``about`` it; local."""
        about = self.description() | about
        return Format(whole=whole, metadata_name=metadata_name, about=about, saves=self._saves)

    def description(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says of the run: axes of the mesh; local."""
        mesh = self.meshes.user
        return {"mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))}

    # ---- errors and the end

    def require_equal(self, lines: Sequence[tuple[str, str]], what: str) -> None:
        """Raise on all ranks unless all call this with the same lines. Collective over all ranks."""
        with self.guarded():
            require_equal(lines, None, what)

    @contextmanager
    def guarded(self) -> Generator[None]:
        """Context in which other ranks learn of an exception; local."""
        if self._is_guarded:  # A call inside of another one: the user's program may catch what it raises.
            yield
            return
        self._is_guarded = True
        if self._watchdog is not None:
            self._watchdog.start()  # Anew, if the program has caught an exception.
        try:
            yield
        except (StopIteration, GeneratorExit):  # They end an iteration, not a run.
            raise
        except BaseException as error:
            for guard in self._guards:
                guard.failed(error)
            raise
        finally:
            self._is_guarded = False

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed, and why; local."""
        for guard in self._guards:
            guard.failed(error)
        self.show_own_weights()

    def program_ends(self) -> None:
        """Tell the other ranks if an exception ends the program; :meth:`close` follows. Local."""
        if self._watchdog is not None:
            self._watchdog.program_ends()

    def close(self) -> None:
        """Remove all hooks; the module stays sharded, and can be saved. Local."""
        self.show_own_weights()
        self._hooks.close()
        try:
            self._stop()
        except RuntimeError as error:
            self._warn(
                f"The weights of the last step have not arrived from all ranks ({error}); load a checkpoint, save none"
            )

    def _switch_on_guards(self) -> None:
        """Make the objects that find mistakes, unless they are there. Collective over the mesh."""
        if self._are_guards_on:
            return
        self._are_guards_on = True
        mode, module = self.mode, self.module
        calls = (mode.call_log if isinstance(mode, Fsdp) else None) or CallLog(module, mode.reduced_over)
        self._guards.append(calls)
        if isinstance(mode, Fsdp):
            of_units = [FailedPasses(mode), SecondDerivatives(module), WrittenWeights(module)]
            self._guards += of_units
            mode.listeners += of_units
        if every := self.options.check_replicas_every_n_steps:
            self._guards.append(ReplicaCheck(module, mode, every=every))
        if self._watchdog is None:
            self._watchdog = Watchdog(calls, silence=self.options.max_silence)
            self._guards.append(self._watchdog)
        self._watchdog.follow(calls)
        self._watchdog.start()

    def _stop(self) -> None:
        guards, self._guards, self._watchdog, self._are_guards_on = self._guards, [], None, False
        for guard in guards:
            guard.close()
        self.mode.close()

    def _begin_backward(self, loss_divided_by: int) -> None:
        """Prepare a backward pass. Collective in the last micro-batch, if tokens are counted."""
        for guard in self._guards:
            guard.backward_begins()
        if self.has_run:
            self._is_finished = False
        if self.tokens is not None and self.is_last_micro_batch:
            self.mode.set_gradient_divisor(self.tokens.divisor(loss_divided_by))

    def _backward_begins(self, _: Tensor) -> None:
        if self._is_attached:
            self._is_reduced = self._is_last_micro_batch
            self._is_finished = False

    def _require_optimizer(self, what: str) -> None:
        if not self._is_attached:
            raise RuntimeError(
                f"{what} of a module that no optimizer was set up for; set up (prepare) one with its parameters"
            )

    def _require_reduced(self, what: str) -> None:
        """Raise unless a backward pass outside of :meth:`no_sync` has reduced the gradients."""
        self._require_optimizer(what)
        if self._is_loop_of_user and not self._is_reduced:
            raise RuntimeError(
                f"{what} after micro-batches that were all inside of no_backward_sync (no_sync), so the ranks have "
                "gradients of their own; run forward and backward of the last micro-batch of a step outside of it"
            )

    def _drop_nonfinite(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients if there is a NaN or Inf, for an optimizer that does not check for them itself."""
        if isinstance(optimizer, PlannedOptimizer):
            return
        parameters, everyone = parameters_of(optimizer), all_ranks()
        if self.pipeline is not None:  # Other stages have other parameters.
            everyone = axis_group(self.mesh, tuple(range(self.mesh.ndim)))
        settings = [(f"group {number}", repr(compared(g))) for number, g in enumerate(optimizer.param_groups)]
        word = zlib.crc32(repr(settings).encode()) >> 1
        if not are_equal(maxima_over(host_group(everyone), both_signs([word]))):
            require_equal(settings, everyone, "what an optimizer goes by")
        found: list[str] = []
        if not self.mode.clip_norm_(parameters, math.inf).isfinite():
            found = ["a parameter of another rank"]
            gradients = {p: self.mode.layout.gradient(p) for p in parameters if p.requires_grad}
            own = [p for p, gradient in gradients.items() if gradient is not None and not gradient.isfinite().all()]
            found = [self._names.get(p, f"a parameter {tuple(p.shape)}") for p in own] or found
        if skips_step(optimizer, found, most_in_a_row=self.options.config.max_skipped_steps):
            for parameter in parameters:
                parameter.grad = None
