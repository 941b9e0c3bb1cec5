"""Trains the stages of this rank, and runs the model for users: each batch by the program of a schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_muon.comm.agreement import together
from lightning_muon.comm.collectives import ALONE, AxisGroup, axis_group
from lightning_muon.config import check_whole
from lightning_muon.optim.parallel_muon import PlannedOptimizer
from lightning_muon.params.routing import keep_routes
from lightning_muon.pipeline.batch_run import BatchRun, Context
from lightning_muon.pipeline.cut import Stages, check_outputs, check_parameters, check_plain, choose_stages, free, untie
from lightning_muon.pipeline.messages import BatchComparison, Links
from lightning_muon.pipeline.model import find_staged_model
from lightning_muon.pipeline.parts import Carry, Part, StagedModel
from lightning_muon.schedule.pipeline import (
    B,
    Order,
    Pipeline,
    add_reduce_grad,
    add_tied,
    add_unshard,
    build_program,
    find_schedule,
    forward_only,
    make_order,
    stage_ranks,
)
from lightning_muon.schedule.program import Op, validate
from lightning_muon.sharding.base import ModeOptions, ShardingMode, mesh_device
from lightning_muon.sharding.tokens import TokenCount
from lightning_muon.sharding.units import map_tensors, tensors_in

# Schedules that visit each rank several times, in rounds or there and back, so that it has several stages.
_STAGES_PER_RANK = {"interleaved_1f1b": 2, "zb_v": 2, "v_half": 2, "v_min": 2}
# The bubble of 1F1B is then at most a fifth of a step: (p - 1) / (m + p - 1).
_MICROBATCHES_PER_RANK = 4


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How a pipeline runs; ``pipeline_size`` says on how many ranks.

    Args:
        pipeline_schedule: In which order each rank runs micro-batches: one of
            :data:`~lightning_muon.schedule.pipeline.SCHEDULES`, among them those of ``@register_schedule``.
        pipeline_microbatches: Micro-batches of each batch. ``"auto"``: four for each rank of the pipeline. Rows that do
            not divide make some larger by one; a batch of fewer rows has one of each row. Losses are summed, so both
            are exact.
        pipeline_split: Names of the first part of each stage. ``None``: about as many elements of matrices in
            each.
        pipeline_stages_per_rank: ``"auto"``: what the schedule needs, 2 for those that visit a rank twice, else 1.
    """

    pipeline_schedule: str = "1f1b"
    pipeline_microbatches: int | Literal["auto"] = "auto"
    pipeline_split: Sequence[str] | None = None
    pipeline_stages_per_rank: int | Literal["auto"] = "auto"

    def check_pipeline(self, num_ranks: int) -> None:
        """Raise ``ValueError`` for values that do not exist, or that a pipeline of ``num_ranks`` cannot have."""
        find_schedule(self.pipeline_schedule)
        for name in ("pipeline_microbatches", "pipeline_stages_per_rank"):
            if (value := getattr(self, name)) != "auto":
                check_whole(name, value, at_least=1, other="'auto' or ")
        if num_ranks == 1:
            changed = [f"{name}={value!r}" for name, value in self.own().items() if value != getattr(type(self), name)]
            if changed:
                raise ValueError(f"{', '.join(changed)} means nothing without pipeline_size; set it to 2 or more")
            return
        make_order(self.pipeline_schedule, self.sizes(num_ranks, self.num_microbatches(num_ranks)))

    def own(self) -> dict[str, object]:
        """All pipeline options by name."""
        return {name: getattr(self, name) for name in PipelineOptions.__dataclass_fields__}

    def num_microbatches(self, num_ranks: int) -> int:
        """Number of micro-batches of each batch."""
        auto = _MICROBATCHES_PER_RANK * num_ranks
        return auto if self.pipeline_microbatches == "auto" else self.pipeline_microbatches

    def sizes(self, num_ranks: int, num_microbatches: int) -> Pipeline:
        """The sizes for which the schedule is made."""
        return Pipeline(num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=self.stages_per_rank)

    @property
    def stages_per_rank(self) -> int:
        """``pipeline_stages_per_rank`` as a number."""
        given = self.pipeline_stages_per_rank
        return _STAGES_PER_RANK.get(self.pipeline_schedule, 1) if given == "auto" else given


GIVE_ALL = (
    "give it all parameters, frozen ones too, which it leaves as they are: AdamW(self.parameters()); or set "
    "pipeline_split so that each rank has something to train"
)


class PipelineRuntime:
    """Holds the stages of this rank, trains them, and answers calls of the model.

    The constructor removes the parts of other ranks from ``module``, in place; other names stay. ``mesh`` has all
    ranks, by (pipeline, replicate, shard). Parameters that parts of several stages share become copies, whose gradients
    are summed. An engine calls, for each training, :meth:`mode_options`, :meth:`take_calls` when the stages are
    sharded, and :meth:`attach`; then :meth:`train` for each batch. Methods are collective over the pipeline, with the
    same batch, unless they are local.
    """

    _mode: ShardingMode

    def __init__(
        self,
        module: nn.Module,
        model: StagedModel,
        stages: Sequence[Sequence[Part]],
        options: PipelineOptions,
        mesh: DeviceMesh,
    ) -> None:
        self._module, self._mesh, self._options = module, mesh, options
        self.group = group = axis_group(mesh, (0,))
        self._num_microbatches = options.num_microbatches(group.size)
        pipeline = options.sizes(group.size, self._num_microbatches)
        rank_of = stage_ranks(make_order(options.pipeline_schedule, pipeline))
        keep_routes(module)
        tied = untie(module, stages)
        own = {stage: parts for stage, parts in enumerate(stages) if rank_of[stage] == group.rank}
        # Name of each copy on this rank -> name of its original.
        self.copied_names = {
            places[stage][2]: next(iter(places.values()))[2]
            for places in tied
            for stage in list(places)[1:]
            if stage in own
        }
        before = dict(module.named_parameters())
        free([part for stage, parts in enumerate(stages) if stage not in own for part in parts])
        present = set(module.parameters())
        # Parameter of another stage -> its name.
        self._absent = WeakTensorKeyDictionary({p: name for name, p in before.items() if p not in present})
        places_of_rank = [{stage: places[stage][:2] for stage in places if stage in own} for places in tied]
        self.stages = Stages(
            model=model,
            parts=own,
            rank_of=rank_of,
            group=group,
            device=mesh_device(mesh),
            tied=list(zip(map(tuple, tied), places_of_rank, strict=True)),
        )
        self.context = Context(
            stages=self.stages,
            links=Links(group, self.stages.device),
            batches=BatchComparison(group, self._take_facts),
            reduce=self._reduce,
        )
        self._programs = cache(self._make_program)
        self._are_trained: list[bool] = []  # Whether parameters of this rank were trained in the last batch.
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._tokens: TokenCount | None = None
        self._is_nonfinite: Tensor | None = None  # Whether any stage has found a NaN or an Inf in this batch.
        # Method of the engine that trains it: forward and backward of a batch.
        self.run_batch: Callable[[], Callable[[Any], Tensor] | None] = lambda: None

    # ---- before the first batch

    def begin(self) -> None:
        """Forget the batches of another training; local, on all ranks."""
        self.context.links.forget_sizes()  # Parameters may have been frozen or unfrozen since.
        self.context.batches.forget()

    def mode_options(self, options: ModeOptions) -> ModeOptions:
        """``options`` for a mode that shards the stages; local."""
        policy = options.mp_policy
        self.context.output_dtype = policy and policy.output_dtype
        return replace(
            options,
            # Parts send each other tensors in the dtype of their computation.
            mp_policy=policy and replace(policy, output_dtype=None),
            roots=self.stages.modules,
            stages=self._mesh,
            # Whole weights stay from the first forward of a batch to the sum of the gradients.
            reshard_after_forward=False,
            reshard_after_backward=False,
        )

    def take_calls(self, mode: ShardingMode, run: Callable[[Any], Tensor]) -> None:
        """Let calls of the module run the stages that ``mode`` has sharded; local.

        ``run`` is the engine's method around :meth:`train`.
        """
        self._mode = mode
        mode.copies = self.stages.copies()
        self.stages.model.take_calls(self.forward)
        # The module keeps this object when the training is over.
        self.run_batch = weakref.WeakMethod(run)

    def require_parameters(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raise ``ValueError`` on all ranks if one of them has an optimizer without parameters."""

        def check() -> None:
            for optimizer in optimizers:
                if not any(group["params"] for group in optimizer.param_groups):
                    raise ValueError(f"{type(optimizer).__name__} has no parameter of a stage of this rank; {GIVE_ALL}")

        together(check, [self.group])

    def attach(self, optimizers: Sequence[torch.optim.Optimizer], tokens: TokenCount | None) -> None:
        """Train with these optimizers and this token count; local."""
        self._optimizers, self._tokens = optimizers, tokens

    def parameters_of_rank(
        self, parameters: Sequence[Tensor], current: Mapping[str, Tensor], replaced: Mapping[Tensor, str]
    ) -> list[Tensor]:
        """``parameters`` without those of other stages, and with the copies of them that this one has; local.

        ``current`` has the parameters of the module by name, ``replaced`` the names of those from before the sharding.
        """
        names = {parameter: name for name, parameter in current.items()}
        chosen: dict[Tensor, None] = {}
        for parameter in parameters:
            name = self._absent.get(parameter)
            if name is None:
                chosen[parameter] = None
                name = replaced.get(parameter) or names.get(parameter)
            chosen |= dict.fromkeys(current[copy] for copy, first in self.copied_names.items() if first == name)
        return list(chosen)

    def _make_program(self, num_microbatches: int, is_training: bool) -> list[Op]:
        """Make and check the program of all ranks, and return the ops of this rank; local."""
        pipeline = self._options.sizes(self.group.size, num_microbatches)
        if not is_training:
            program = build_program(forward_only(pipeline, self.stages.rank_of), pipeline)
        else:
            program = build_program(self._order(pipeline), pipeline, tells_loss=True)
            program = add_tied(add_reduce_grad(add_unshard(program)), [stages for stages, _ in self.stages.tied])
        validate(program)
        return program[self.group.rank]

    def _order(self, pipeline: Pipeline) -> Order:
        """The order of the schedule; if a batch has too few rows for it, all forwards, then all backwards. Local."""
        if pipeline.num_microbatches < self._num_microbatches:
            with suppress(ValueError):
                order = make_order(self._options.pipeline_schedule, pipeline)
                if stage_ranks(order) == self.stages.rank_of:
                    return order
            forwards = forward_only(pipeline, self.stages.rank_of)
            return [[*nodes, *(B(node.stage, node.microbatch) for node in reversed(nodes))] for nodes in forwards]
        return make_order(self._options.pipeline_schedule, pipeline)

    # ---- batches

    def train(self, batch: Any) -> Tensor:
        """Run forward, backward and the sum of gradients of a batch; return its mean loss.

        See :meth:`~lightning_muon.engine.training.TrainingEngine.run_pipeline`, which calls it. Parameters may have
        been frozen, or unfrozen, since the last batch. Collective over all ranks.

        Raises:
            ValueError: If the ranks have different batches; before any message.
            RuntimeError: If an earlier batch has left gradients, or messages.
        """
        if self._tokens is not None:
            self._tokens.reset()
        self._mode.begin_forward()
        try:
            with self._mode.no_sync():
                loss, is_nonfinite = self._forward_and_backward(batch)
        except BaseException:
            if self._tokens is not None:
                self._tokens.reset()
            self._mode.pass_failed()
            raise
        self._skip_step_if(is_nonfinite)
        return loss

    def _forward_and_backward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return :meth:`BatchRun.result` of a batch."""

        def cut() -> tuple[Any, list[Any]]:
            self.context.links.require_finished()
            self._require_no_gradients()
            both = self.stages.model.split(batch)
            return both, self._split(both)

        are_trained = [parameter.requires_grad for module in self.stages.modules for parameter in module.parameters()]
        # Other ranks must know, because it decides which sent tensors require gradients.
        has_changed, self._are_trained = are_trained != self._are_trained, are_trained
        copies = [[getattr(*place).requires_grad for place in own.values()] for _, own in self.stages.tied]
        trained, frozen = [any(each) for each in copies], [not all(each) for each in copies]
        pieces = self.context.batches.begin(cut, [has_changed, *trained, *frozen])
        # The seed comes from the generator that checkpoints save: a resumed run continues with the same numbers.
        run = BatchRun(self.context, pieces, is_training=True, seed=int(torch.randint(2**62, ())))
        with torch.autocast(self.stages.device.type, enabled=False):  # Each forward enters its own.
            run.run(self._programs(len(pieces), True))
        return run.result()

    def _reduce(self, modules: Sequence[nn.Module], num_losses: Tensor) -> None:
        """Reduce the gradients of the sum of this rank's losses over all data ranks."""
        if self._tokens is None:
            factor = 1 / num_losses.clamp(min=1)
        else:
            factor = torch.ones_like(num_losses)
            if not self._tokens.is_summed:
                self._tokens.begin_micro_batch()
                self._tokens.report(num_losses)
            self._mode.set_gradient_divisor(self._tokens.divisor(1))
        self._mode.reduce_part(modules, factor)

    def _require_no_gradients(self) -> None:
        """Raise if an earlier batch has left gradients; local."""
        left = [name for name, parameter in self._module.named_parameters() if parameter.grad is not None]
        if left:
            raise RuntimeError(
                f"{left[0]} still has the gradient of an earlier batch; call zero_grad before each batch of a "
                "pipeline. Larger batches, and pipeline_microbatches, stand for accumulated gradients"
            )

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

    def _take_facts(self, facts: Sequence[bool]) -> None:
        """Forget sizes if a rank has frozen or unfrozen something; raise if that was one copy of a parameter. Local."""
        if any(facts[:1]):
            self.context.links.forget_sizes()
        trained, frozen = facts[1 : 1 + len(tied := self.stages.tied)], facts[1 + len(tied) :]
        for (stages, _), *is_either in zip(tied, trained, frozen, strict=False):
            if all(is_either):
                raise RuntimeError(
                    f"stages {', '.join(map(str, stages))} of the pipeline have copies of one parameter (a tied "
                    "weight), of which one is frozen and another one is trained; call requires_grad_ on the copies of "
                    "all ranks"
                )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of :attr:`StagedModel.root` with the result of the whole model, on every rank.

        Raises:
            RuntimeError: If gradients are enabled, since no loss can be computed from the result.
        """
        model = self.stages.model
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(model.root).__name__} is divided over the ranks of a pipeline, and returns no output that "
                "a loss could be computed from; in a loop call lightning_muon.forward_backward(model, batch) instead "
                "of the model and of backward, and evaluate under torch.no_grad()"
            )

        def cut() -> tuple[Any, tuple[list[Any], Any]]:
            self.context.links.require_finished()
            inputs, target = model.inputs_of_call(args, kwargs)
            return (inputs, target), (self._split((inputs, None)), target)

        pieces, target = self.context.batches.begin(cut)
        run = BatchRun(self.context, pieces, is_training=False)
        run.run(self._programs(len(pieces), False))
        outputs = [run.outputs.get(index) for index in range(len(pieces))]
        return model.result_of_call(self._share(outputs), target)

    def _share(self, outputs: Sequence[Carry | None]) -> Carry:
        """Send the rows of all micro-batches from the rank of the last stage to every rank, and return them."""
        source = self.stages.rank_of[self.stages.last]
        if self.group.rank == source:
            columns = zip(*(output if isinstance(output, tuple) else (output,) for output in outputs), strict=True)
            whole = [torch.cat(column) for column in columns]
            described: list[Any] = [[(each.shape, each.dtype) for each in whole], isinstance(outputs[0], tuple)]
        else:
            whole, described = [], [None, None]
        dist.broadcast_object_list(described, group=self.group.group, group_src=source, device=self.stages.device)
        whole = whole or [torch.empty(shape, dtype=dtype, device=self.stages.device) for shape, dtype in described[0]]
        for each in whole:
            dist.broadcast(each, group=self.group.group, group_src=source)
        return tuple(whole) if described[1] else whole[0]

    def _split(self, value: Any) -> list[Any]:
        """Split a batch into micro-batches whose sizes differ by at most one row."""
        rows = next((each.shape[0] for each in tensors_in(value) if each.ndim > 0), 0)
        if rows == 0:
            raise ValueError("a batch of a pipeline needs a tensor with rows, to be cut into micro-batches")
        number = min(self._num_microbatches, rows)

        def piece(index: int) -> Any:
            return map_tensors(
                value,
                lambda _, each: each.tensor_split(number)[index] if each.ndim and each.shape[0] == rows else each,
            )

        return [piece(index) for index in range(number)]


_KEY = "lightning_muon_pipeline"  # Attribute of a module that was cut: options and runtime.
# Each module in one that was cut, itself too -> that one, and the name in it.
_PLACES: WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = WeakKeyDictionary()


def cut_once(module: nn.Module, options: PipelineOptions, mesh: DeviceMesh) -> PipelineRuntime:
    """Cut a module, or a LightningModule, once, and return its runtime, which it keeps for later trainings.

    It loses the parts of other ranks. Collective over ``mesh``, all ranks by (pipeline, replicate, shard).

    Raises:
        ValueError: If it cannot be cut in this way, or was cut in another one before.
    """
    num_ranks = mesh.size(0)
    if (known := vars(module).get(_KEY)) is None:

        def choose() -> tuple[StagedModel, list[list[Part]]]:
            check_plain(module)
            model = find_staged_model(module)
            check_outputs(module, model)
            check_parameters(module, model.parts)
            return model, choose_stages(model, num_ranks * options.stages_per_rank, options.pipeline_split)

        model, stages = together(choose, [axis_group(mesh, tuple(range(mesh.ndim)))])
        vars(module)[_KEY] = known = options, PipelineRuntime(module, model, stages, options, mesh)
    before, runtime = known
    if options.own() != before.own() or runtime.group.size != num_ranks:
        raise ValueError(f"the model was cut into stages with {before.own()}; build it anew for {options.own()}")
    _PLACES.update({child: (weakref.ref(module), name) for name, child in module.named_modules()})
    runtime.begin()
    return runtime


def is_stage(module: nn.Module) -> bool:
    """Whether :func:`cut_once` has removed parts of other ranks from a module; local."""
    return _KEY in vars(module)


def place_in_stage(module: nn.Module) -> tuple[nn.Module | None, str]:
    """The module that was cut and holds ``module``, and its name there; ``None`` without a pipeline. Local.

    A wrapper, such as Fabric's, is at the place of what it wraps.

    Raises:
        ValueError: If ``module`` has weights beside those of a stage.
    """
    for inner in module.modules():
        if inner in _PLACES:
            stage, name = _PLACES[inner]
            if set(module.parameters()) != set(inner.parameters()):
                raise ValueError(
                    f"{type(module).__name__} holds a stage of a pipeline, {type(inner).__name__}, and other weights; "
                    "ask for those of each by itself"
                )
            return stage(), name
    return None, ""


def runtime_of(stage: nn.Module) -> PipelineRuntime:
    """The runtime of a module that was cut; local."""
    return vars(stage)[_KEY][1]


def forward_backward(model: nn.Module, batch: Any) -> Tensor:
    """Run forward and backward of a batch through all stages of a pipeline; a loop calls it instead of both.

    ``model`` was set up by Fabric with ``pipeline_size`` of 2 or more. Gradients are ready for clipping and the step
    when it returns; the loss, the mean over the batch of this data rank, is the same on all ranks of the pipeline and
    has no graph. Collective over all ranks, and ranks of one pipeline with the same batch.

    Example::

        model, optimizer = fabric.setup(model, optimizer)
        for batch in loader:
            loss = lightning_muon.forward_backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()

    Raises:
        ValueError: If the model is no stage of a pipeline that is being trained.
    """
    stage = next((module for module in model.modules() if is_stage(module)), None)
    run_batch = None if stage is None else runtime_of(stage).run_batch()
    if run_batch is None:
        raise ValueError(
            f"{type(model).__name__} is no stage of a pipeline; set it up with pipeline_size of 2 or more, or call the "
            "model and backward"
        )
    return run_batch(batch)


def group_of(module: nn.Module) -> AxisGroup:
    """The ranks of the pipeline of ``module``; only this rank if it was not cut. Local."""
    return runtime_of(module).group if is_stage(module) else ALONE


def names_of_copies(module: nn.Module) -> dict[str, str]:
    """Name of each parameter of this rank that is a copy -> name of its original in an earlier stage; local."""
    return runtime_of(module).copied_names if is_stage(module) else {}
