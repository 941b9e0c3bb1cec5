"""Runs batches through the stages of this rank, op by op as the program of a schedule says."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_muon.comm.agreement import gather
from lightning_muon.comm.groups import ALONE, AxisGroup, axis_group
from lightning_muon.grad_sync.clipping import local_norms
from lightning_muon.params.layout import local_tensor
from lightning_muon.pipeline.backward import Branch, backward_input, backward_weight
from lightning_muon.pipeline.batches import BatchComparison
from lightning_muon.pipeline.cut import check_parameters, check_plain, choose_stages, only, remove, untie
from lightning_muon.pipeline.messages import Arriving, Link
from lightning_muon.pipeline.model import Carry, Part, StagedModel, find_staged_model
from lightning_muon.pipeline.options import PipelineOptions
from lightning_muon.schedule.pipeline import (
    B,
    Order,
    Pipeline,
    PipelineKind,
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
from lightning_muon.sharding.outputs import map_tensors, tensors_in, without_views
from lightning_muon.sharding.weights import mesh_device

_Key = tuple[int, int]  # Stage and micro-batch.


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What a runtime asks of whoever has sharded the parts of a stage."""

    gather: Callable[[Sequence[nn.Module]], None] = lambda _: None
    # Adds what a part of a backward pass has left for modules to the sums of the passes before.
    accumulate: Callable[[Sequence[nn.Module]], None] = lambda _: None
    # Takes modules and a factor: makes of the gradients that backward passes have summed those of all data ranks.
    reduce: Callable[[Sequence[nn.Module], Tensor], None] = lambda _, __: None


@dataclass(frozen=True)
class Result:
    """Of a step of training, the same on all ranks of the pipeline."""

    total: Tensor  # Sum of the losses.
    count: Tensor  # Of how many.
    # Whether the loss, or a gradient of this rank or one with copies of its parameters, is NaN or Inf: a bool on the
    # device, by which all of them skip the step.
    is_nonfinite: Tensor

    @property
    def mean(self) -> Tensor:
        """The loss of the batch."""
        return self.total / self.count.clamp(min=1)


class PipelineRuntime:
    """The stages of this rank.

    The constructor takes the parts of other ranks out of ``module``, in place; names of what is left stay. Parameters
    that parts of several stages share become copies, whose gradients are summed. All methods are collective over
    ``group`` unless they are local; every rank must call them, with the same batch.

    Args:
        model: How ``module`` is cut.
        module: Holds the model, and nothing beside it that trains.
        group: The ranks of the pipeline.
        schedule: Name of a schedule; see :data:`~lightning_muon.schedule.pipeline.SCHEDULES`.
        num_microbatches: Into which each batch is cut; a batch of fewer rows has one of each.
        stages_per_rank: Number of stages of each rank.
        first_parts: Name of the first part of each stage.
        device: Where messages lie.
    """

    def __init__(
        self,
        model: StagedModel,
        module: nn.Module,
        *,
        group: AxisGroup,
        schedule: str,
        num_microbatches: int,
        stages_per_rank: int,
        first_parts: Sequence[str],
        device: torch.device,
    ) -> None:
        self._model, self._group, self._schedule = model, group, schedule
        self._num_microbatches, self._stages_per_rank, self._device = num_microbatches, stages_per_rank, device
        self.shards = Shards()
        self.recorder: Any = None  # A TimelineRecorder is told when ops begin and end.
        # The methods of who trains it.
        self.run_batch: Callable[[], Callable[[Any], Tensor] | None] = lambda: None
        self.loss_of_batch: Callable[[], Callable[[Any, Tensor | None], Tensor] | None] = lambda: None
        self.forward_context: Callable[[], AbstractContextManager[None]] = nullcontext  # Around each forward: autocast.
        self.output_dtype: torch.dtype | None = (
            None  # Of what the model returns, and its loss gets; as computed if None.
        )
        pipeline = self._sizes(num_microbatches)
        self._rank_of = placement(make_order(schedule, pipeline))
        stages = choose_stages(model, pipeline.num_stages, first_parts)
        check_parameters(module, model.parts)
        stage_of = {id(part): stage for stage, parts in enumerate(stages) for part in parts}
        # Of parameters that several stages have: the stages, and the places of the copies of this rank.
        self._tied: list[tuple[tuple[int, ...], dict[int, tuple[nn.Module, str]]]] = []
        names = {id(child): name for name, child in module.named_modules()}
        self.copied_names: dict[str, str] = {}  # Of each copy on this rank -> of what it is a copy.
        for places in untie([part for parts in stages for part in parts]):
            of_stage = {stage_of[id(part)]: (holder, name) for part, holder, name in places}
            own = {stage: place for stage, place in of_stage.items() if self._is_own(stage)}
            self._tied.append((tuple(of_stage), own))
            first, *copies = ((f"{names[id(holder)]}.{name}", stage_of[id(part)]) for part, holder, name in places)
            self.copied_names |= {copy: first[0] for copy, stage in copies if self._is_own(stage)}
        self.stages: Mapping[int, list[Part]] = {
            stage: parts for stage, parts in enumerate(stages) if self._is_own(stage)
        }
        remove([part for stage, parts in enumerate(stages) if stage not in self.stages for part in parts])
        self._last_stage = pipeline.num_stages - 1
        self._links: dict[int, Link] = {}
        self._programs = cache(self._make_program)
        self._num_forwards = 0  # Of training.
        self.batches = BatchComparison(group)

    def _is_own(self, stage: int) -> bool:
        return self._rank_of[stage] == self._group.rank

    def _sizes(self, num_microbatches: int) -> Pipeline:
        return Pipeline(
            num_ranks=self._group.size, num_microbatches=num_microbatches, stages_per_rank=self._stages_per_rank
        )

    @property
    def root(self) -> Any:
        """What users call."""
        return self._model.root

    @property
    def group(self) -> AxisGroup:
        """The ranks of the pipeline."""
        return self._group

    @property
    def modules(self) -> list[nn.Module]:
        """Those of the parts of this rank, in the order of forward."""
        return [module for stage in sorted(self.stages) for module in self.modules_of(stage)]

    def modules_of(self, stage: int) -> list[nn.Module]:
        """Those of one of its stages."""
        return [module for part in self.stages[stage] for module in part.modules]

    def copies(self) -> set[Tensor]:
        """Parameters of this rank that are copies of one of an earlier stage, which norms count."""
        places = [(stages[0], stage, place) for stages, own in self._tied for stage, place in own.items()]
        return {getattr(*place) for first, stage, place in places if stage != first}

    def _make_program(self, num_microbatches: int, is_training: bool) -> list[Op]:
        """The ops of this rank, of a program that was checked with those of all ranks; local."""
        pipeline = self._sizes(num_microbatches)
        if not is_training:
            program = build_program(forward_only(pipeline, self._rank_of), pipeline)
        else:
            program = build_program(self._order(pipeline), pipeline, tells_loss=True)
            program = add_tied(add_reduce_grad(add_unshard(program)), [stages for stages, _ in self._tied])
        validate_pipeline(program, pipeline, is_training=is_training)
        return program[self._group.rank]

    def _order(self, pipeline: Pipeline) -> Order:
        """That of the schedule; for a batch of too few rows for it, all forwards and then all backwards. Local."""
        if pipeline.num_microbatches < self._num_microbatches:
            with suppress(ValueError):
                order = make_order(self._schedule, pipeline)
                if placement(order) == self._rank_of:
                    return order
            forwards = forward_only(pipeline, self._rank_of)
            return [[*nodes, *(B(node.stage, node.microbatch) for node in reversed(nodes))] for nodes in forwards]
        return make_order(self._schedule, pipeline)

    def train(
        self, batch: Any, *, factor: Callable[[Tensor], Tensor], check: Callable[[], None] = lambda: None
    ) -> Result:
        """Forward and backward of a batch, whose gradients are then reduced.

        ``factor`` takes the number of losses and returns what the gradients of their sum are multiplied by. What
        ``check`` raises on some ranks is raised on all of the pipeline.

        Raises:
            ValueError: If the ranks have different batches; before any message.
        """

        def cut() -> tuple[Any, list[Any]]:
            check()
            both = self._model.split(batch)
            return both, self._split(both)

        pieces = self.batches.begin(cut)
        run = _Run(self, pieces, is_training=True, factor=factor)
        run.run(self._programs(len(pieces), True))
        return Result(run.total, run.count, run.is_nonfinite)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole model returns for a call of :attr:`StagedModel.root`, on every rank.

        With gradients that is the loss of a batch of training, and the schedule runs forward and backward; without, the
        whole output.
        """
        if torch.is_grad_enabled():
            batch, num_losses = self._model.batch_of_call(args, kwargs)
            if (compute := self.loss_of_batch()) is None:
                raise RuntimeError("the training of this pipeline is over; call the model under torch.no_grad()")
            return self._model.result_of_training(compute(batch, num_losses))

        def cut() -> tuple[Any, tuple[list[Any], Any]]:
            inputs, target = self._model.inputs_of_call(args, kwargs)
            return (inputs, target), (self._split((inputs, None)), target)

        pieces, target = self.batches.begin(cut)
        run = _Run(self, pieces, is_training=False)
        run.run(self._programs(len(pieces), False))
        outputs = [run.outputs.get(index) for index in range(len(pieces))]
        return self._model.result_of_call(self._share(outputs), target)

    def take_calls(self) -> None:
        """From now on calls of :attr:`root` are those of the whole model; local."""
        self._model.take_calls(self.forward)

    def _share(self, outputs: Sequence[Carry | None]) -> Carry:
        """The rows of all micro-batches, which the rank of the last stage has, on every rank."""
        source = self._rank_of[self._last_stage]
        if self._group.rank == source:
            columns = zip(*(output if isinstance(output, tuple) else (output,) for output in outputs), strict=True)
            whole = [torch.cat(column) for column in columns]
            described: list[Any] = [[(each.shape, each.dtype) for each in whole], isinstance(outputs[0], tuple)]
        else:
            whole, described = [], [None, None]
        if self._group.group is not None:
            dist.broadcast_object_list(described, group=self._group.group, group_src=source, device=self._device)
            whole = whole or [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in described[0]]
            for each in whole:
                dist.broadcast(each, group=self._group.group, group_src=source)
        return tuple(whole) if described[1] else whole[0]

    def _split(self, value: Any) -> list[Any]:
        """Micro-batches, whose sizes differ by at most one row."""
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

    def begin_run(self) -> None:
        """Forget what the ranks know of each other's messages: parameters may have been frozen since, or unfrozen."""
        self._links.clear()
        self.batches.forget()

    @contextmanager
    def random_numbers(self, stage: int) -> Generator[None]:
        """Of each stage and micro-batch its own, as dropout needs them; those that others draw stay the same. Local."""
        on_cuda = self._device.type == "cuda"
        seed = hash((torch.initial_seed(), stage, self._num_forwards)) % 2**63
        self._num_forwards += 1
        with torch.random.fork_rng([self._device] if on_cuda else []):
            torch.default_generator.manual_seed(seed)
            if on_cuda:
                torch.cuda.manual_seed(seed)
            yield

    def link(self, peer: int) -> Link:
        """To another rank of the pipeline; local."""
        assert self._group.group is not None
        return self._links.setdefault(peer, Link(self._group.group, peer, self._device))


@dataclass
class _Run:
    """One batch on its way."""

    runtime: PipelineRuntime
    pieces: Sequence[tuple[Any, Any]]  # Inputs and targets of each micro-batch.
    is_training: bool
    factor: Callable[[Tensor], Tensor] = torch.ones_like
    outputs: dict[int, Carry] = field(default_factory=dict)  # Of the last stage, by micro-batch.
    # What a stage gets, as leaves of its graph, or on its way; and the same for the gradients of what it returns.
    _inputs: dict[_Key, Arriving | Sequence[Tensor]] = field(default_factory=dict)
    _gradients: dict[_Key, Arriving | Sequence[Tensor]] = field(default_factory=dict)
    # What backward needs: the leaves, and what was returned; and what the first part of a backward leaves.
    _graphs: dict[_Key, tuple[Sequence[Tensor], Sequence[Tensor]]] = field(default_factory=dict)
    _weights: dict[_Key, Sequence[Branch]] = field(default_factory=dict)
    _sums: list[Tensor] = field(default_factory=list)
    _counts: list[Tensor] = field(default_factory=list)
    _loss: Arriving | None = None
    _summed: Tensor | None = None
    _are_finite: list[Tensor] = field(default_factory=list)  # All gradients of ranks that sum those of copies.

    def run(self, ops: Sequence[Op]) -> None:
        """Run the ops of this rank."""
        steps: dict[str, Callable[[Op], None]] = {
            PipelineKind.FORWARD: self._forward,
            PipelineKind.BACKWARD: self._backward,
            PipelineKind.BACKWARD_INPUT: self._backward_input,
            PipelineKind.BACKWARD_WEIGHT: self._backward_weight,
            PipelineKind.ACTIVATION: self._send_or_receive_activation,
            PipelineKind.GRADIENT: self._send_or_receive_gradient,
            PipelineKind.LOSS: self._send_or_receive_loss,
            PipelineKind.UNSHARD: lambda op: self.runtime.shards.gather(self.runtime.modules_of(op.items[0])),
            PipelineKind.RESHARD: lambda op: None,  # The sum of the gradients frees the weights.
            PipelineKind.REDUCE_GRAD: self._reduce,
            PipelineKind.TIED: self._sum_tied,
        }
        recorder = self.runtime.recorder
        for op in ops:
            if op.group:
                self.runtime.batches.finish()
            if recorder is not None:
                recorder.started(op)
            steps[op.kind](op)
            if recorder is not None and not self._is_received(op):
                recorder.ended(op)
        for link in self.runtime._links.values():
            link.finish()

    def _is_received(self, op: Op) -> bool:
        """Whether it is a message to this rank, which ends when somebody needs it: gloo tells nobody before."""
        is_message = op.kind in (PipelineKind.ACTIVATION, PipelineKind.GRADIENT, PipelineKind.LOSS)
        return is_message and op.group[1] == self.runtime._group.rank

    def _noted(self, op: Op, message: Arriving) -> Arriving:
        """The message, whose end a recorder is told."""
        recorder = self.runtime.recorder
        return message if recorder is None else message._replace(then=partial(recorder.ended, op))

    def _arrived(self, op: Op, tensors: Arriving | Sequence[Tensor]) -> Sequence[Tensor]:
        """What an op takes. For a recorder the op begins when that is there: to wait is no work."""
        if not isinstance(tensors, Arriving):
            return tensors
        present = tensors.wait()
        if self.runtime.recorder is not None:
            self.runtime.recorder.started(op)
        return present

    @property
    def total(self) -> Tensor:
        """Sum of all losses; known where the gradients are reduced."""
        return self._totals[0]

    @property
    def count(self) -> Tensor:
        """Of how many."""
        return self._totals[1]

    @property
    def is_nonfinite(self) -> Tensor:
        """See :class:`Result`."""
        return torch.stack([self.total.isfinite(), *self._are_finite]).all().logical_not()

    @property
    def _totals(self) -> Tensor:
        if self._summed is None:
            if self._loss is not None:
                (self._summed,) = self._loss.wait()
            else:
                self._summed = torch.stack([torch.stack(each).double().sum() for each in (self._sums, self._counts)])
        return self._summed

    def _key(self, microbatch: int) -> tuple[Any, ...]:
        """What decides about the sizes of messages: equal on all ranks, which have the same batch."""
        return (self.is_training, *(tuple(each.shape) for each in tensors_in(self.pieces[microbatch], set())))

    def _forward(self, op: Op) -> None:
        runtime, model = self.runtime, self.runtime._model
        stage, microbatch = op.items
        inputs, target = self.pieces[microbatch]
        leaves = [] if stage == 0 else self._arrived(op, self._inputs.pop((stage, microbatch)))
        carry = None if stage == 0 else leaves[0] if len(leaves) == 1 else tuple(leaves)
        is_last = stage == runtime._last_stage
        numbers = runtime.random_numbers(stage) if self.is_training else nullcontext()
        with only(runtime.stages, stage), runtime.forward_context(), numbers:
            output = model.run(runtime.stages[stage], carry, inputs)
            if is_last and runtime.output_dtype is not None:
                output = map_tensors(output, lambda _, x: x.to(runtime.output_dtype) if x.is_floating_point() else x)
            if is_last and self.is_training:
                output, count = model.loss(output, target)
                self._sums.append(output.detach())
                self._counts.append(torch.as_tensor(count, device=output.device))
        if is_last and not self.is_training:
            self.outputs[microbatch] = output
            return
        tensors = _tensors_of(without_views(output, (leaves, inputs)), stage)
        following = (stage + 1, microbatch)
        if self.is_training:
            self._graphs[stage, microbatch] = leaves, tensors
        if runtime._rank_of.get(stage + 1) == runtime._group.rank:
            self._inputs[following] = [each.detach().requires_grad_(each.requires_grad) for each in tensors]
        elif stage != runtime._last_stage and not self.is_training:
            self._graphs[stage, microbatch] = (), tensors  # Until they are sent.

    def _send_or_receive_activation(self, op: Op) -> None:
        """The message of what a forward returns."""
        (stage, microbatch), (sender, receiver) = op.items, op.group
        key = (stage, "activation", *self._key(microbatch))
        if sender == self.runtime._group.rank:
            self.runtime.link(receiver).send(self._graphs[stage, microbatch][1], key)
            if not self.is_training:
                del self._graphs[stage, microbatch]
        else:
            self._inputs[stage + 1, microbatch] = self._noted(op, self.runtime.link(sender).receive(key))

    def _take_graph(self, op: Op) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor] | None]:
        """Leaves and results that require gradients, and the gradients of the results, if they are not ones."""
        stage, microbatch = op.items
        graph = self._graphs.pop((stage, microbatch))
        leaves, outputs = ([each for each in tensors if each.requires_grad] for tensors in graph)
        is_last = stage == self.runtime._last_stage
        return leaves, outputs, None if is_last else self._arrived(op, self._gradients.pop((stage, microbatch)))

    def _backward(self, op: Op) -> None:
        leaves, outputs, gradients = self._take_graph(op)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        self._keep_gradients(op, leaves, [leaf.grad for leaf in leaves])

    def _backward_input(self, op: Op) -> None:
        stage, microbatch = op.items
        if stage == 0:  # No rank waits for gradients of its inputs: the whole backward is done with the other part.
            return
        leaves, outputs, gradients = self._take_graph(op)
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if outputs and leaves:
            found, self._weights[stage, microbatch] = backward_input(outputs, gradients, leaves)
        elif outputs:
            torch.autograd.backward(outputs, gradients)
        self._keep_gradients(op, leaves, found)

    def _backward_weight(self, op: Op) -> None:
        stage, microbatch = op.items
        if stage == 0:
            self._backward(op)
        elif (rest := self._weights.pop((stage, microbatch), None)) is not None:
            backward_weight(rest)
            self.runtime.shards.accumulate(self.runtime.modules_of(stage))

    def _keep_gradients(self, op: Op, leaves: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
        """Gradients of what a stage got are those of what the stage before returned."""
        stage, microbatch = op.items
        if stage > 0:
            pairs = zip(leaves, found, strict=True)
            self._gradients[stage - 1, microbatch] = [
                torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in pairs
            ]

    def _send_or_receive_gradient(self, op: Op) -> None:
        """The message of the gradients of what a stage got."""
        (stage, microbatch), (sender, receiver) = op.items, op.group
        key = (stage, "gradient", *self._key(microbatch))
        if sender == self.runtime._group.rank:
            self.runtime.link(receiver).send(self._arrived(op, self._gradients.pop((stage - 1, microbatch))), key)
        else:
            self._gradients[stage - 1, microbatch] = self._noted(op, self.runtime.link(sender).receive(key))

    def _send_or_receive_loss(self, op: Op) -> None:
        sender, receiver = op.group
        if sender == self.runtime._group.rank:
            self.runtime.link(receiver).send_known([self._totals])
        else:
            both = torch.empty(2, dtype=torch.float64, device=self.runtime._device)
            self._loss = self._noted(op, self.runtime.link(sender).receive_known([both]))

    def _reduce(self, op: Op) -> None:
        count = self.count  # May wait for the message with it.
        if self.runtime.recorder is not None:
            self.runtime.recorder.started(op)
        self.runtime.shards.reduce(self.runtime.modules_of(op.items[0]), self.factor(count))

    def _sum_tied(self, op: Op) -> None:
        """Add up the gradients of the copies of a parameter, in the order of the stages, on each rank that has one."""
        runtime = self.runtime
        stages, own = runtime._tied[op.items[0]]
        parameters = {stage: getattr(holder, name) for stage, (holder, name) in own.items()}
        for parameter in parameters.values():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        # Frozen ones send zeros, too: another rank may have unfrozen its copy.
        gradients = {
            stage: torch.zeros_like(local_tensor(parameter.detach()))
            if parameter.grad is None
            else local_tensor(parameter.grad)
            for stage, parameter in parameters.items()
        }
        others = sorted({runtime._rank_of[stage] for stage in stages} - {runtime._group.rank})
        if others and not self._are_finite:  # The last ops of a rank: all of its gradients are there.
            self._are_finite.append(self._has_finite_gradients())
        found = dict(gradients)
        arriving: dict[int, Arriving] = {}
        for peer in others:
            link, theirs = runtime.link(peer), [stage for stage in stages if runtime._rank_of[stage] == peer]
            empty = [torch.empty_like(next(iter(gradients.values()))) for _ in theirs]
            empty.append(torch.empty_like(self._are_finite[0]))
            # A rank steps its copies only if the others step theirs.
            own_parts = [*(gradients[stage].clone() for stage in sorted(gradients)), self._are_finite[0]]
            # The lower rank sends first: with NCCL two that both do wait for each other.
            if runtime._group.rank < peer:
                link.send_known(own_parts)
            arriving[peer] = link.receive_known(empty)
            if runtime._group.rank > peer:
                link.send_known(own_parts)
        for peer, parts in arriving.items():
            theirs = sorted(stage for stage in stages if runtime._rank_of[stage] == peer)
            *their_gradients, are_finite = parts.wait()
            self._are_finite.append(are_finite)
            found |= dict(zip(theirs, their_gradients, strict=True))
        total = torch.stack([found[stage] for stage in sorted(found)]).sum(0)
        for gradient in gradients.values():
            gradient.copy_(total)

    def _has_finite_gradients(self) -> Tensor:
        """Whether all gradients of this rank are finite; a bool on the device. Local."""
        parameters = [p for module in self.runtime.modules for p in module.parameters() if p.grad is not None]
        gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
        norms = local_norms([each for each in gradients if each.numel()], is_exact=False)
        return torch.stack([*norms, torch.zeros((), device=self.runtime._device)]).isfinite().all()


_KEY = "lightning_muon_pipeline"  # Of a module that was cut.


def cut_once(module: nn.Module, options: PipelineOptions, mesh: DeviceMesh) -> PipelineRuntime:
    """The stages of this rank, which a module keeps from its first training on. Collective over ``mesh``.

    Args:
        module: The model, or a LightningModule; loses the parts of other ranks.
        options: How to cut it.
        mesh: All ranks, by (pipeline, replicate, shard).

    Raises:
        ValueError: If it cannot be cut so, or was cut in another way before.
    """
    group = axis_group(mesh, (0,))
    if not is_stage(module):
        check_plain(module)
    if (known := vars(module).get(_KEY)) is None:
        model, num_stages = find_staged_model(module), group.size * options.stages_per_rank
        stages = choose_stages(model, num_stages, options.pipeline_split)
        # That of one rank: what was measured on the others may, in odd models, depend on the rank.
        first_parts = gather([parts[0].name for parts in stages], axis_group(mesh, tuple(range(mesh.ndim))))[0]
        vars(module)[_KEY] = known = (
            options,
            PipelineRuntime(
                model,
                module,
                group=group,
                schedule=options.pipeline_schedule,
                num_microbatches=options.num_microbatches(group.size),
                stages_per_rank=options.stages_per_rank,
                first_parts=first_parts,
                device=mesh_device(mesh),
            ),
        )
    before, runtime = known
    if options.own() != before.own() or runtime.group.size != group.size:
        raise ValueError(f"the model was cut into stages with {before.own()}; build it anew for {options.own()}")
    runtime.begin_run()
    return runtime


def is_stage(module: nn.Module) -> bool:
    """Whether :func:`cut_once` has taken parts of other ranks out of it; local."""
    return _KEY in vars(module)


def runtime_of(stage: nn.Module) -> PipelineRuntime:
    """What runs the stages of a module that was cut; local."""
    return vars(stage)[_KEY][1]


def forward_backward(model: nn.Module, batch: Any) -> Tensor:
    """Forward and backward of a batch through all stages of a pipeline: what a loop calls in the place of both.

    ``model`` was set up by Fabric or prepared by our Accelerator with ``pipeline_size`` of 2 or more. Gradients are
    ready for clipping and the step when it returns; the loss, the mean over the batch of this data rank, is the same on
    all ranks of the pipeline and has no graph. Collective over all ranks; every rank must call it, and ranks of one
    pipeline with the same batch.

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
    """The ranks of its pipeline; this one alone if ``module`` was not cut. Local."""
    return runtime_of(module).group if is_stage(module) else ALONE


def names_of_copies(module: nn.Module) -> dict[str, str]:
    """Name of each parameter of this rank that is a copy -> its name in the stage before; local."""
    return runtime_of(module).copied_names if is_stage(module) else {}


def _tensors_of(output: Carry, stage: int) -> list[Tensor]:
    tensors = list(output) if isinstance(output, tuple) else [output]
    for each in tensors:
        if not isinstance(each, Tensor):
            raise TypeError(
                f"stage {stage} returns a {type(each).__name__}; parts of a pipeline return a tensor or a tuple of "
                "tensors"
            )
    return tensors
