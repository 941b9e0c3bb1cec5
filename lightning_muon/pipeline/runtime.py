"""Runs batches through the stages of this rank, op by op, by the program of a schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import together
from lightning_muon.comm.groups import ALONE, AxisGroup, axis_group
from lightning_muon.params.routing import keep_routes
from lightning_muon.pipeline.batch_run import BatchRun
from lightning_muon.pipeline.batches import BatchComparison
from lightning_muon.pipeline.cut import check_outputs, check_parameters, check_plain, choose_stages, free, untie
from lightning_muon.pipeline.messages import Link
from lightning_muon.pipeline.model import find_staged_model
from lightning_muon.pipeline.options import PipelineOptions
from lightning_muon.pipeline.parts import Carry, Part, StagedModel
from lightning_muon.schedule.pipeline import (
    B,
    Order,
    Pipeline,
    add_reduce_grad,
    add_tied,
    add_unshard,
    build_program,
    forward_only,
    make_order,
    placement,
    validate_pipeline,
)
from lightning_muon.schedule.program import Op
from lightning_muon.sharding.outputs import map_tensors, tensors_in
from lightning_muon.sharding.weights import mesh_device


class PipelineRuntime:
    """Holds and runs the stages of this rank.

    The constructor removes the parts of other ranks from ``module``, in place; other names stay. Parameters
    that parts of several stages share become copies, whose gradients are summed. All methods are collective over
    ``group`` unless they are local; every rank must call them, with the same batch.

    Args:
        module: The module that holds the model, and nothing else that trains.
        model: How it is cut.
        stages: The parts of each stage.
        options: Options.
        mesh: All ranks, by (pipeline, replicate, shard).
    """

    def __init__(
        self,
        module: nn.Module,
        model: StagedModel,
        stages: Sequence[Sequence[Part]],
        options: PipelineOptions,
        mesh: DeviceMesh,
    ) -> None:
        self.group = group = axis_group(mesh, (0,))
        self.model, self.device, self._options = model, mesh_device(mesh), options
        self._num_microbatches = options.num_microbatches(group.size)
        # Takes modules and a factor, and reduces the gradients that backward passes have summed over all data ranks.
        self.reduce: Callable[[Sequence[nn.Module], Tensor], None] = lambda _, __: None
        # Method of the engine that trains it: forward and backward of a batch.
        self.run_batch: Callable[[], Callable[[Any], Tensor] | None] = lambda: None
        self.forward_context: Callable[[], AbstractContextManager[None]] = nullcontext  # Around each forward: autocast.
        # Dtype of the model's output, also for its loss; as computed if None.
        self.output_dtype: torch.dtype | None = None
        pipeline = options.sizes(group.size, self._num_microbatches)
        self.rank_of = placement(make_order(options.pipeline_schedule, pipeline))
        keep_routes(module)
        tied = [(tuple(places), places) for places in untie(module, stages)]
        # For each parameter that several stages have: the stages, and the places of the copies on this rank.
        self.tied = [(of, {stage: places[stage][:2] for stage in of if self._is_own(stage)}) for of, places in tied]
        # Name of each copy on this rank -> name of its original.
        self.copied_names = {
            places[stage][2]: places[of[0]][2] for of, places in tied for stage in of[1:] if self._is_own(stage)
        }
        self.stages: Mapping[int, Sequence[Part]] = {
            stage: parts for stage, parts in enumerate(stages) if self._is_own(stage)
        }
        free([part for stage, parts in enumerate(stages) if stage not in self.stages for part in parts])
        self.last_stage = pipeline.num_stages - 1
        self.links: dict[int, Link] = {}
        self._programs = cache(self._make_program)
        self.has_lost_messages = False  # Whether an exception has ended a batch before all its messages were received.
        self.batches = BatchComparison(group, self._require_equal_copies)
        self._are_trained: list[bool] = []  # Whether parameters of this rank were trained in the last batch.

    def _is_own(self, stage: int) -> bool:
        return self.rank_of[stage] == self.group.rank

    @property
    def modules(self) -> list[nn.Module]:
        """Modules of the parts of this rank, in the order of forward."""
        return [module for stage in sorted(self.stages) for module in self.modules_of(stage)]

    def modules_of(self, stage: int) -> list[nn.Module]:
        """Modules of one of its stages."""
        return [module for part in self.stages[stage] for module in part.modules]

    def copies(self) -> set[Tensor]:
        """Parameters of this rank that are copies of one of an earlier stage; norms count that one instead."""
        places = [(stages[0], stage, place) for stages, own in self.tied for stage, place in own.items()]
        return {getattr(*place) for first, stage, place in places if stage != first}

    def _make_program(self, num_microbatches: int, is_training: bool) -> list[Op]:
        """Make and check the program of all ranks, and return the ops of this rank; local."""
        pipeline = self._options.sizes(self.group.size, num_microbatches)
        if not is_training:
            program = build_program(forward_only(pipeline, self.rank_of), pipeline)
        else:
            program = build_program(self._order(pipeline), pipeline, tells_loss=True)
            program = add_tied(add_reduce_grad(add_unshard(program)), [stages for stages, _ in self.tied])
        validate_pipeline(program, pipeline, is_training=is_training)
        return program[self.group.rank]

    def _order(self, pipeline: Pipeline) -> Order:
        """The order of the schedule; if a batch has too few rows for it, all forwards, then all backwards. Local."""
        if pipeline.num_microbatches < self._num_microbatches:
            with suppress(ValueError):
                order = make_order(self._options.pipeline_schedule, pipeline)
                if placement(order) == self.rank_of:
                    return order
            forwards = forward_only(pipeline, self.rank_of)
            return [[*nodes, *(B(node.stage, node.microbatch) for node in reversed(nodes))] for nodes in forwards]
        return make_order(self._options.pipeline_schedule, pipeline)

    def train(
        self, batch: Any, *, factor: Callable[[Tensor], Tensor], check: Callable[[], None]
    ) -> tuple[Tensor, Tensor]:
        """Run forward and backward of a batch, and reduce its gradients; return :meth:`BatchRun.result`.

        ``factor`` takes the number of losses and returns the factor on the gradients of their sum. An error of
        ``check`` is raised on all ranks of the pipeline. Parameters may have been frozen, or unfrozen, since the last
        batch.

        Raises:
            ValueError: If the ranks have different batches; before any message.
        """

        def cut() -> tuple[Any, list[Any]]:
            self._require_messages()
            check()
            both = self.model.split(batch)
            return both, self._split(both)

        are_trained = [parameter.requires_grad for module in self.modules for parameter in module.parameters()]
        # Other ranks must know, because it decides which sent tensors require gradients.
        has_changed, self._are_trained = are_trained != self._are_trained, are_trained
        copies = [[getattr(*place).requires_grad for place in own.values()] for _, own in self.tied]
        trained, frozen = [any(each) for each in copies], [not all(each) for each in copies]
        pieces = self.batches.begin(cut, [has_changed, *trained, *frozen])
        # The seed comes from the generator that checkpoints save: a resumed run continues with the same numbers.
        run = BatchRun(self, pieces, is_training=True, factor=factor, seed=int(torch.randint(2**62, ())))
        with torch.autocast(self.device.type, enabled=False):  # Each forward enters its own; a backward needs none.
            run.run(self._programs(len(pieces), True))
        return run.result()

    def _require_equal_copies(self, facts: Sequence[bool]) -> None:
        """Raise, alike on all ranks, if one copy of a parameter is frozen and another one trained."""
        trained, frozen = facts[1 : 1 + len(self.tied)], facts[1 + len(self.tied) :]
        for (stages, _), *is_either in zip(self.tied, trained, frozen, strict=False):
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
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(self.model.root).__name__} is divided over the ranks of a pipeline, and returns no output that "
                "a loss could be computed from; in a loop call lightning_muon.forward_backward(model, batch) instead "
                "of the model and of backward, and evaluate under torch.no_grad()"
            )

        def cut() -> tuple[Any, tuple[list[Any], Any]]:
            self._require_messages()
            inputs, target = self.model.inputs_of_call(args, kwargs)
            return (inputs, target), (self._split((inputs, None)), target)

        pieces, target = self.batches.begin(cut)
        run = BatchRun(self, pieces, is_training=False)
        run.run(self._programs(len(pieces), False))
        outputs = [run.outputs.get(index) for index in range(len(pieces))]
        return self.model.result_of_call(self._share(outputs), target)

    def _require_messages(self) -> None:
        if self.has_lost_messages:
            raise RuntimeError(
                "an exception has ended an earlier batch of this pipeline, whose messages are still on their way and "
                "would be taken for those of this one; start the processes again, from a checkpoint"
            )

    def _share(self, outputs: Sequence[Carry | None]) -> Carry:
        """Send the rows of all micro-batches from the rank of the last stage to every rank, and return them."""
        source = self.rank_of[self.last_stage]
        if self.group.rank == source:
            columns = zip(*(output if isinstance(output, tuple) else (output,) for output in outputs), strict=True)
            whole = [torch.cat(column) for column in columns]
            described: list[Any] = [[(each.shape, each.dtype) for each in whole], isinstance(outputs[0], tuple)]
        else:
            whole, described = [], [None, None]
        dist.broadcast_object_list(described, group=self.group.group, group_src=source, device=self.device)
        whole = whole or [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in described[0]]
        for each in whole:
            dist.broadcast(each, group=self.group.group, group_src=source)
        return tuple(whole) if described[1] else whole[0]

    def _split(self, value: Any) -> list[Any]:
        """Split a batch into micro-batches whose sizes differ by at most one row."""
        rows = next((each.shape[0] for each in tensors_in(value, set()) if each.ndim > 0), 0)
        if rows == 0:
            raise ValueError("a batch of a pipeline needs a tensor with rows, to be cut into micro-batches")
        number = min(self._num_microbatches, rows)

        def piece(index: int) -> Any:
            return map_tensors(
                value,
                lambda _, each: each.tensor_split(number)[index] if each.ndim and each.shape[0] == rows else each,
            )

        return [piece(index) for index in range(number)]

    def link(self, peer: int) -> Link:
        """The link to another rank of the pipeline; local."""
        assert self.group.group is not None
        return self.links.setdefault(peer, Link(self.group.group, peer, self.device))


_KEY = "lightning_muon_pipeline"  # Attribute of a module that was cut: options and runtime.
# Each module in one that was cut, itself too -> that one, and the name in it.
_PLACES: WeakKeyDictionary[nn.Module, tuple[weakref.ref[nn.Module], str]] = WeakKeyDictionary()


def cut_once(module: nn.Module, options: PipelineOptions, mesh: DeviceMesh) -> PipelineRuntime:
    """Cut a module once, and return its runtime, which it keeps for later trainings. Collective over ``mesh``.

    Args:
        module: The model, or a LightningModule; loses the parts of other ranks.
        options: How to cut it.
        mesh: All ranks, by (pipeline, replicate, shard).

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
    # Forget the known sizes of messages: parameters may have been frozen or unfrozen since.
    runtime.links.clear()
    runtime.batches.forget()
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
