"""Runs the program of a step: what each op of the plan does, and who waits for it.

The order is the program's. An executor looks up what an op does by its kind, and keeps the promises of ``Op.deps``.
Before it stand AdamW and the SGD of FlexDeMo, for what is no matrix; behind it NorMuon, with its second moments.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from typing_extensions import override

from lightning_muon.comm.collectives import BufferPool, start_all_reduce_sum
from lightning_muon.compat import foreach
from lightning_muon.compat.torch import profiled
from lightning_muon.config import AdjustLr, name_of_function
from lightning_muon.math.newton_schulz import (
    NewtonSchulz,
    NewtonSchulzGraphs,
    NewtonSchulzOptions,
    can_record,
    lr_scale,
    worth_batching,
)
from lightning_muon.optim.parameters import MOMENTUM, SECOND_MOMENT, Gradients, States
from lightning_muon.optim.step_plan import StepPlan
from lightning_muon.optim.transfer import Transfer
from lightning_muon.params.layout import Matrix, PlacedState, local_tensor, neuron_shape, own_part_of
from lightning_muon.schedule.program import TRANSFER, Op, OpKind, scatter_buffers_for

# One step in place for local tensors of one param group: parameters, gradients, states, and group.
Elementwise = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[dict[str, Any]], dict[str, Any]], None]
# From so many elements on, a dtype conversion costs more in bytes than in launches: 8 bytes an element at 4 TB/s,
# against 5 us a launch.
_LEAST_ALONE = 1 << 21


def number(value: Any) -> Any:
    """A hyper-parameter, which may be a tensor on the CPU, as a number."""
    return float(value) if isinstance(value, Tensor) else value


def add_scaled_(targets: Sequence[Tensor], updates: Sequence[Tensor], alpha: float) -> None:
    """Targets <- targets + alpha * updates, in the dtype of the targets, which all have the same one."""
    pairs = list(zip(targets, updates, strict=True))
    if targets[0].is_cuda and updates[0].dtype != targets[0].dtype:
        small = [(target, update) for target, update in pairs if update.numel() < _LEAST_ALONE]
        pairs = [(target, update) for target, update in pairs if update.numel() >= _LEAST_ALONE]
        if small:
            converted = [torch.empty(u.shape, dtype=target.dtype, device=target.device) for target, u in small]
            foreach.copy_(converted, [update for _, update in small])
            foreach.add_([target for target, _ in small], converted, alpha=alpha)
    if pairs:
        foreach.add_([target for target, _ in pairs], [update for _, update in pairs], alpha=alpha)


def decay_(weights: Sequence[Tensor], rate: float) -> None:
    """Weights <- weights * (1 - rate)."""
    if weights[0].device.type == "cpu":
        for weight in weights:
            # Not foreach.mul_: for bfloat16 on a CPU it rounds the factor to bfloat16, 0.998 to 0.9961.
            weight.mul_(1 - rate)
    else:
        foreach.mul_(list(weights), 1 - rate)


def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    group: dict[str, Any],
) -> None:
    """One AdamW step (Loshchilov and Hutter 2019, arXiv:1711.05101, Algorithm 2); the arithmetic is torch's own."""
    # By whether one kernel does it all; on a card that one takes parameters of one count of steps, else it is None.
    by_kernel: dict[tuple[bool, float | None], list[tuple[Tensor, ...]]] = {}
    for parameter, gradient, state in zip(params, grads, states, strict=True):
        given = parameter, gradient, local_tensor(state["exp_avg"]), local_tensor(state["exp_avg_sq"])
        # One pass over memory: on a CPU it takes a third to a fifth of the time of one operation after the other, on a
        # card a quarter. It runs over `numel` elements from the first address on: gaps between rows would be wrong.
        is_fused = parameter.device.type in ("cpu", "cuda") and all(map(Tensor.is_contiguous, given))
        count = float(state["step"]) if is_fused and parameter.is_cuda else None
        by_kernel.setdefault((is_fused, count), []).append((*given, state["step"]))
    for (is_fused, count), members in by_kernel.items():
        weights, gradients, first_moments, second_moments, steps = map(list, zip(*members, strict=True))
        counted = steps if count is None else [*weights[0].new_full((len(steps),), count, dtype=torch.float32)]
        adamw(
            weights,
            gradients,
            first_moments,
            second_moments,
            [],
            counted,
            foreach=weights[0].is_cuda and not is_fused,
            fused=is_fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=number(group["lr"]),
            weight_decay=number(group["weight_decay"]),
            eps=group["adamw_eps"],
            maximize=False,
        )
        if count is not None:
            foreach.add_(steps, 1)


def sgd_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Any]],
    group: dict[str, Any],
) -> None:
    """Params <- (1 - lr * weight_decay) * params - lr * grads; an :data:`Elementwise`."""
    lr = number(group["lr"])
    if group["weight_decay"]:
        decay_(params, lr * group["weight_decay"])
    foreach.add_(list(params), list(grads), alpha=-lr)


class MatrixStep:
    """Walks through the ops of a plan, which are always in the same order on every rank."""

    def __init__(
        self,
        plan: StepPlan,
        states: States,
        *,
        wire_dtype: torch.dtype,
        elementwise: Elementwise = adamw_step_,
        has_momentum: bool = True,
    ) -> None:
        """Take second moments from ``states``. Collective over the meshes of the plan."""
        self.moments = SecondMoments(plan, states)
        self.plan, self._elementwise, self._has_momentum = plan, elementwise, has_momentum
        self._pool = BufferPool(wire_dtype, plan.device)
        self._graphs = NewtonSchulzGraphs(wire_dtype, plan.device) if can_record(plan.device) else None
        # Rolling buffers, on the way to the owners and back.
        look_ahead = plan.options.issued_ahead
        self._slots = {
            key: (index % max(1, look_ahead), index % scatter_buffers_for(look_ahead))
            for index, key in enumerate(plan.buckets)
        }
        self._transfers: dict[str, Transfer] = {}
        # Of the current step.
        self._gradients: Gradients = {}
        self._states: States = {}
        # Set to measure: gets each owned matrix, and what Newton-Schulz has made of it (rows, cols).
        self.observer: Callable[[Matrix, Tensor], None] | None = None
        self.executor = make_executor(
            {
                OpKind.MOMENTUM: self._momentum,
                OpKind.GATHER: self._communicate,
                OpKind.NEWTON_SCHULZ: self._newton_schulz,
                OpKind.SCATTER: self._communicate,
                OpKind.UPDATE: self._update,
                OpKind.ADAMW: self._adamw,
            },
            plan.device,
        )

    def close(self) -> None:
        """Free what a new plan needs the memory of; local. The rest waits for a garbage collection, as in any cycle."""
        if self._graphs is not None:
            self._graphs.close()

    def run(self, gradients: Gradients, states: States) -> None:
        """Update all parameters with gradients. Collective over the axes of each exchange group."""
        self._gradients, self._states = gradients, states
        taking_part = {key for key in self.plan.buckets if self._transfer_of(key, gradients).matrices}
        self.plan.layout.begin_step(list(gradients))
        self.executor.begin()
        for op in self.plan.ops:
            if op.kind == OpKind.ADAMW or op.key in taking_part:
                self.executor.execute(op)
        self.executor.finish()
        self._gradients, self._states = {}, {}

    def _transfer_of(self, key: str, gradients: Gradients) -> Transfer:
        """The transfer of a bucket; views are costly, so it is kept as long as the same matrices take part."""
        bucket, transfer = self.plan.buckets[key], self._transfers.get(key)
        matrices = bucket.matrices
        if not all(tensor in gradients for tensor in bucket.tensors):
            matrices = tuple(each for each in matrices if each.parameter.tensor in gradients)
        if transfer is None or transfer.matrices != matrices:
            transfer = self._transfers[key] = Transfer(bucket.group, matrices, self._pool, self._slots[key])
        return transfer

    def _adamw(self, op: Op) -> Sequence[dist.Work]:
        """Update the parameters that are no matrices and take part."""
        layout, gradients = self.plan.layout, self._gradients
        for group, members in self.plan.elementwise:
            tensors = [tensor for tensor in members if tensor in gradients]
            if tensors:
                self._elementwise(
                    [layout.local(tensor) for tensor in tensors],
                    [gradients[tensor] for tensor in tensors],
                    [self._states[tensor] for tensor in tensors],
                    group,
                )
        layout.updated(self.plan.done[op.name])
        return ()

    def _communicate(self, op: Op) -> Sequence[dist.Work]:
        """Send the pieces to the owners, or the updates back to the ranks that hold the pieces."""
        transfer = self._transfers[op.key]
        return (transfer.scatter if op.kind == OpKind.SCATTER else transfer.gather).start()

    def _momentum(self, op: Op) -> Sequence[dist.Work]:
        """Update the momentum of the local pieces; pack its look-ahead."""
        transfer = self._transfers[op.key]
        for (momentum, nesterov), matrices in self._runs(transfer.held, "momentum", "nesterov"):
            if not self._has_momentum:
                transfer.pack(matrices, self._grads(matrices))
                continue
            buffers = self._momenta(matrices)
            grads = self._grads(matrices, buffers[0].dtype)
            foreach.lerp_(buffers, grads, 1 - momentum)
            transfer.pack(matrices, foreach.lerp(grads, buffers, momentum) if nesterov else buffers)
        return ()

    def _newton_schulz(self, op: Op) -> Sequence[dist.Work]:
        """Orthogonalize the owned matrices; small ones of equal shape as one batch."""
        transfer = self._transfers[op.key]
        if self._graphs is not None:
            self._graphs.begin()
        batches = [(batch, *self._prepared(batch)) for batch in _batches(transfer.owned, self._pool.device.type)]
        transfer.unpack(
            {
                matrix: whole.view(matrix.box.shape)
                for batch, stack, _ in batches
                for matrix, whole in zip(batch, stack.unbind(), strict=True)
            }
        )
        updates: dict[Matrix, Tensor] = {}
        for batch, _, orthogonalized in batches:
            for matrix, each in zip(batch, orthogonalized().unbind(), strict=True):
                if self.observer is not None:
                    self.observer(matrix, each)
                if matrix in self.moments.of:
                    beta2 = number(matrix.parameter.group["normuon_beta2"])
                    each = self.moments.normalized(matrix, each, beta2=beta2)
                updates[matrix] = each.reshape(matrix.box.shape)
        transfer.pack_updates(updates)
        return ()

    def _prepared(self, batch: Sequence[Matrix]) -> tuple[Tensor, Callable[[], Tensor]]:
        """Memory for matrices of one shape (batch, rows, cols), and what makes their updates once they are there."""
        newton_schulz, group = batch[0].newton_schulz(self.plan.options.arithmetic), batch[0].parameter.group
        function, eps, shape = group["orthogonalize"], group["eps"], (len(batch), batch[0].rows, batch[0].cols)
        if self._graphs is not None and not callable(function):
            recorded = self._graphs.take(shape, newton_schulz, eps=eps)
            if recorded is not None:
                return recorded
        matrices = torch.empty(shape, dtype=self._pool.dtype, device=self._pool.device)
        if not callable(function):
            return matrices, partial(newton_schulz.orthogonalize, matrices, eps=eps)
        if not batch[0].is_transposed:
            return matrices, partial(orthogonalized_by, function, matrices, newton_schulz, eps=eps)
        return matrices, lambda: orthogonalized_by(function, matrices.mT, newton_schulz, eps=eps).mT

    def _update(self, op: Op) -> Sequence[dist.Work]:
        """Decay and update the local pieces of a bucket's parameters."""
        transfer = self._transfers[op.key]
        update_of = transfer.updates()
        keys = ("lr", "muon_lr_factor", "weight_decay", "adjust_lr_fn")
        for (shared_lr, factor, weight_decay, adjust_lr_fn), matrices in self._runs(transfer.held, *keys):
            lr = shared_lr * factor
            views = [each.local_view(self.plan.layout.local(each.parameter.tensor)) for each in matrices]
            updates = [update_of[matrix] for matrix in matrices]
            decay_(views, lr * weight_decay)
            by_scale: dict[float, list[int]] = {}
            for index, matrix in enumerate(matrices):
                by_scale.setdefault(lr_scale_of(matrix, adjust_lr_fn), []).append(index)
            for scale, members in by_scale.items():
                add_scaled_([views[i] for i in members], [updates[i] for i in members], -(lr * scale))
        self.plan.layout.updated(self.plan.done[op.name])
        return ()

    def _runs(self, matrices: Sequence[Matrix], *keys: str) -> Iterator[tuple[tuple[Any, ...], Sequence[Matrix]]]:
        """Yield matrices together whose param groups have equal values for ``keys``, with these values.

        On a CPU, yield them one by one: what one operation writes is in the cache for the next, which is 2.5 times
        faster at 0.5 to 2 MB.
        """
        by_group: dict[int, list[Matrix]] = {}
        for matrix in matrices:
            by_group.setdefault(id(matrix.parameter.group), []).append(matrix)
        by_values: dict[tuple[Any, ...], list[Matrix]] = {}
        for members in by_group.values():
            group = members[0].parameter.group
            by_values.setdefault(tuple(number(group[key]) for key in keys), []).extend(members)
        for values, members in by_values.items():
            if self._pool.device.type == "cpu":
                yield from ((values, [matrix]) for matrix in members)
            else:
                yield values, members

    def _grads(self, matrices: Sequence[Matrix], dtype: torch.dtype | None = None) -> list[Tensor]:
        """The calling rank's pieces of the gradients, converted to ``dtype`` if it is given."""
        grads = [each.local_view(self._gradients[each.parameter.tensor]) for each in matrices]
        return grads if dtype in (None, grads[0].dtype) else [grad.to(dtype) for grad in grads]

    def _momenta(self, matrices: Sequence[Matrix]) -> list[Tensor]:
        """The calling rank's pieces of the momenta. Shares memory."""
        return [each.local_view(local_tensor(self._states[each.parameter.tensor][MOMENTUM])) for each in matrices]


def orthogonalized_by(
    function: Callable[..., Any], matrices: Tensor, newton_schulz: NewtonSchulz, *, eps: float
) -> Tensor:
    """The updates that a user's function makes of ``matrices`` (batch, outputs, inputs).

    Raises a ``TypeError`` for those of another shape or dtype.
    """

    def plain(matrices: Tensor) -> Tensor:
        return newton_schulz.orthogonalize(matrices, eps=eps).to(matrices.dtype)

    updates: Any = function(matrices, newton_schulz=plain)
    wanted = f"{tuple(matrices.shape)} {matrices.dtype}"
    found = f"{tuple(updates.shape)} {updates.dtype}" if isinstance(updates, Tensor) else type(updates).__name__
    if found != wanted:
        raise TypeError(
            f"orthogonalize={name_of_function(function)} returned {found} for matrices {wanted}; return updates of the "
            "same shape and dtype, such as updates.to(matrices.dtype)"
        )
    return updates


def lr_scale_of(matrix: Matrix, adjust_lr_fn: AdjustLr) -> float:
    """Factor on the learning rate of a matrix."""
    return lr_scale(matrix.rows, matrix.cols, adjust_lr_fn, is_transposed=matrix.is_transposed)


def _batches(matrices: Sequence[Matrix], device_type: str) -> list[list[Matrix]]:
    """The matrices that are orthogonalized together."""
    batches: dict[Hashable, list[Matrix]] = {}
    # Once for each param group: a model may have thousands of small matrices.
    groups = {id(matrix.parameter.group): matrix.parameter.group for matrix in matrices}
    options = {
        # A group with a function of its own shares no batch.
        number: (NewtonSchulzOptions.of(group), group["eps"], callable(group["orthogonalize"]) and number)
        for number, group in groups.items()
    }
    for matrix in matrices:
        if worth_batching(matrix.rows, matrix.cols, device_type):
            alike = (matrix.box.shape, matrix.rows, matrix.is_transposed, options[id(matrix.parameter.group)])
            batches.setdefault(alike, []).append(matrix)
        else:
            batches[matrix] = [matrix]
    return list(batches.values())


# An action on the transfer lane starts a communication, and returns its handles.
Action = Callable[[Op], Sequence[dist.Work]]


class Executor(ABC):
    """Runs ops one by one; one executor serves many steps."""

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self._actions = actions
        self.recorder: Any = None  # Is told when ops start and end; see TimelineRecorder in monitor/step_monitor.py.

    @contextmanager
    def measured(self, op: Op) -> Generator[None]:
        """Context for what is measured as an op, but is none of the program."""
        with profiled(op.kind, op.key):
            if self.recorder is not None:
                self.recorder.started(op)
            yield
            if self.recorder is not None:
                self.recorder.ended(op)

    def begin(self) -> None:  # noqa: B027
        """Begin a step, also after one that has raised."""

    @abstractmethod
    def execute(self, op: Op) -> None:
        """Run one op after the ops that it depends on."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all ops that still run, and forget the step."""


class HostExecutor(Executor):
    """Compute ops block the host; a communication runs in threads of the backend until an op that needs it begins."""

    def __init__(self, actions: Mapping[str, Action]) -> None:
        super().__init__(actions)
        self._pending: dict[str, Sequence[dist.Work]] = {}
        self._to_record: dict[str, Callable[[], None]] = {}

    @override
    def execute(self, op: Op) -> None:
        for name in op.deps:
            self.wait(name)
        with profiled(op.kind, op.key):
            if self.recorder is not None:
                self.recorder.started(op)
            works = self._actions[op.kind](op)
            if self.recorder is not None:
                self._record_end(op, works, self.recorder)
        if works:
            self._pending[op.name] = works

    @override
    def finish(self) -> None:
        for name in list(self._pending):
            self.wait(name)

    def wait(self, name: str) -> None:
        """Wait until the op called ``name`` has ended, if it was run in this step."""
        for work in self._pending.pop(name, ()):
            work.wait()
        if name in self._to_record:
            self._to_record.pop(name)()

    def _record_end(self, op: Op, works: Sequence[dist.Work], recorder: Any) -> None:
        ended = partial(recorder.ended, op)
        if not works:
            ended()
            return
        try:
            works[-1].get_future().then(lambda _: ended())  # pyright: ignore[reportUnknownMemberType, reportUnknownLambdaType]
        except RuntimeError:
            # gloo's messages between two ranks have no future: they end, for the recorder, when somebody needs them.
            self._to_record[op.name] = ended


class StreamExecutor(Executor):
    """The host queues everything and never waits: one stream per lane, an event at the end of each op.

    The compute lane is the stream that is current at :meth:`begin`. Tensors cross streams only in buffers that
    live as long as the executor's owner, so that the allocator never hands out memory still in use.
    """

    def __init__(self, actions: Mapping[str, Action], device: torch.device) -> None:
        super().__init__(actions)
        self._device, self._transfer = device, torch.cuda.Stream(device, priority=-1)  # Before products.
        self._compute = torch.cuda.current_stream(device)  # Of the current step; to look it up takes torch 30 us.
        self._ended: dict[str, tuple[str, torch.cuda.Event | torch.Event]] = {}

    @override
    def begin(self) -> None:
        self._compute = torch.cuda.current_stream(self._device)
        self._ended.clear()

    @override
    def execute(self, op: Op) -> None:
        is_transfer = op.lane == TRANSFER
        stream = self._transfer if is_transfer else self._compute
        context = torch.cuda.stream(stream) if is_transfer else nullcontext()
        with context:
            for name in op.deps:
                # Not of an earlier step, for which finish() has waited.
                if name in self._ended and self._ended[name][0] != op.lane:
                    stream.wait_event(self._ended[name][1])
            with self.measured(op):
                for work in self._actions[op.kind](op):
                    work.wait()  # NCCL: the stream waits, not the host.
            self._ended[op.name] = op.lane, stream.record_event()

    @override
    def finish(self) -> None:
        for lane, event in self._ended.values():
            if lane == TRANSFER:
                self._compute.wait_event(event)
        self._ended.clear()


def make_executor(actions: Mapping[str, Action], device: torch.device) -> Executor:
    """The executor for ``device``."""
    return StreamExecutor(actions, device) if device.type == "cuda" else HostExecutor(actions)


# Denominator term of the published implementation (github.com/zichongli5/NorMuon, normuon.py).
_NORMUON_EPS = 1e-10


def normalize_neurons_(update: Tensor, second_moment: Tensor, *, beta2: float) -> Tensor:
    """The NorMuon update of an orthogonalized ``update`` O (rows, cols), float32; changes ``second_moment`` v (rows,).

    ``v <- beta2 v + (1 - beta2) mean_cols(O^2)``, then ``O_i / (sqrt(v_i) + eps)`` for each row, scaled to the
    Frobenius norm ``sqrt(min(rows, cols))`` of an orthogonal matrix: times ``0.2 sqrt(max(rows, cols))``
    (``match_rms_adamw``) that is the paper's ``0.2 sqrt(rows cols) / |O|``. A zero matrix stays zero.

    Source: Li et al. 2025, arXiv:2510.05491, Algorithm 1.
    """
    whole = update.to(torch.float32)
    second_moment.lerp_(whole.square().mean(-1), 1 - beta2)
    whole = whole / (second_moment.sqrt() + _NORMUON_EPS).unsqueeze(-1)
    norm = whole.square().sum().sqrt() + _NORMUON_EPS
    return whole.mul_(math.sqrt(min(update.shape)) / norm)


class SecondMoments:
    """Second moments of the neurons of the matrices that the calling rank owns: float32, (neurons,)."""

    def __init__(self, plan: StepPlan, states: States) -> None:
        """Take them from the states. Collective over the meshes of the plan."""
        self.are_outdated = False  # Whether the states were loaded since, so that the next step makes a new plan.
        self._groups = [
            (group.axes, [matrix for matrix in group.matrices if matrix.parameter.group["normuon"]])
            for group in plan.exchange_groups
        ]
        self._shapes: dict[Tensor, tuple[int, ...]] = {
            each.parameter.tensor: neuron_shape(tuple(each.parameter.tensor.shape), each.parameter.route)
            for _, matrices in self._groups
            for each in matrices
        }
        whole = self._gathered(plan, states)
        # To be changed in place.
        self.of: dict[Matrix, Tensor] = {}
        for axes, matrices in self._groups:
            for matrix in (each for each in matrices if each.owner == axes.rank):
                values = whole[matrix.parameter.tensor][matrix.neuron_box.slices].reshape(-1)
                # A process alone updates its state itself.
                self.of[matrix] = values if axes.group is None else values.clone()

    def normalized(self, matrix: Matrix, update: Tensor, *, beta2: float) -> Tensor:
        """The NorMuon update of an owned matrix that has a moment; local."""
        if matrix.is_transposed:
            return normalize_neurons_(update.mT, self.of[matrix], beta2=beta2).mT
        return normalize_neurons_(update, self.of[matrix], beta2=beta2)

    def outdate(self) -> None:
        """Note that the states were loaded; local."""
        self.are_outdated = bool(self._shapes)

    def _gathered(self, plan: StepPlan, states: States) -> dict[Tensor, Tensor]:
        """The whole state of each parameter that has some. Collective over the meshes of the plan."""
        tensors = [tensor for members in plan.meshes for tensor in members.tensors if tensor in self._shapes]
        placed = [PlacedState(tensor, states[tensor][SECOND_MOMENT], self._shapes[tensor]) for tensor in tensors]
        saved = plan.layout.saved(placed) if placed else []
        return {
            tensor: each.full_tensor() if isinstance(each, DTensor) else each
            for tensor, each in zip(tensors, saved, strict=True)
        }

    def write(self, states: States, newer: Collection[Tensor]) -> None:
        """Write them to the states of all ranks, except those of ``newer``, which were made since.

        Collective over the axes of each exchange group that has some.
        """
        whole = {
            tensor: torch.zeros(shape, dtype=torch.float32, device=tensor.device)
            for tensor, shape in self._shapes.items()
        }
        for axes, matrices in (each for each in self._groups if each[1]):
            sizes = [matrix.num_neurons for matrix in matrices]
            values = torch.zeros(sum(sizes), dtype=torch.float32, device=matrices[0].parameter.tensor.device)
            parts = dict(zip(matrices, torch.split(values, sizes), strict=True))
            for matrix, part in parts.items():
                if matrix.owner == axes.rank:
                    part.copy_(self.of[matrix])
            if axes.group is not None:
                start_all_reduce_sum(values, axes).wait()
            for matrix, part in parts.items():
                box = matrix.neuron_box
                whole[matrix.parameter.tensor][box.slices] = part.view(box.shape)
        for tensor, values in whole.items():
            if SECOND_MOMENT in states.get(tensor, ()) and tensor not in newer and not self.are_outdated:
                state: Tensor = states[tensor][SECOND_MOMENT]
                if isinstance(state, DTensor):
                    state.to_local().copy_(own_part_of(values, state))
                elif state.numel():  # With zero2 it is on one rank of the shard axis.
                    state.copy_(values)
