"""Runs the program of a step: what each op of the plan does. The order is the program's, the waiting the executor's."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.collectives import BufferPool
from lightning_muon.compat import foreach
from lightning_muon.math.newton_schulz import lr_scale, orthogonalize, worth_batching
from lightning_muon.optim.elementwise import adamw_step_, add_scaled_, number
from lightning_muon.optim.executor import make_executor
from lightning_muon.optim.parameters import Gradients, ParamGroup, States
from lightning_muon.optim.step_plan import MatrixBucket, MatrixJob, StepPlan
from lightning_muon.optim.transfer import BucketPieces, Transfer
from lightning_muon.params.layout import local_tensor
from lightning_muon.schedule.passes import scatter_buffers_for
from lightning_muon.schedule.program import (
    ADAMW,
    CHECK,
    DEFERRED,
    EARLY_GATHER,
    EARLY_MOMENTUM,
    EVERY_KEY,
    GATHER,
    GRADIENTS,
    IN_BACKWARD,
    IN_STEP,
    MOMENTUM,
    NEWTON_SCHULZ,
    SCATTER,
    SENT,
    UPDATE,
    VALID,
    Facts,
    Op,
    runs,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class AgreedGradients:
    """What all ranks know of the gradients of a step, equal on all of them but for the tensors."""

    gradients: Gradients  # Local gradient of every parameter that takes part.
    sent: frozenset[str] = frozenset()  # Buckets that any rank has sent during backward.
    valid: frozenset[str] = frozenset()  # Those of them whose gradients are still what was sent.
    # Where the values of gradients are not known yet (CUDA, or gradients that arrive late): waits for them, and raises,
    # on all ranks, to give up the step. On CUDA the host waits for the device here, and nowhere else in a step.
    deferred_check: Callable[[], None] | None = None
    # Values of hyper-parameters that are tensors on a device; `deferred_check` fills it.
    numbers: dict[Tensor, float] = field(default_factory=dict[Tensor, float])
    # Whether this rank knows that the deferred check will raise, and may lack state or have a wrong hyper-parameter: it
    # takes part in what travels, whatever is in the buffers.
    is_given_up: bool = False


class Elementwise(Protocol):
    """Updates local parts of parameters of one param group that are no matrices."""

    def __call__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        group: ParamGroup,
        numbers: Mapping[Tensor, float],
    ) -> None:
        """One step in place; ``numbers`` are the values of hyper-parameters that are tensors on a device."""
        ...


class MatrixStep:
    """Walks through the ops of a plan, which are always in the same order on every rank.

    The ops of a bucket in the backward phase may be run from hooks of the backward pass (:meth:`run_in_backward`): they
    read the state and do not change it, so that what they sent can be thrown away.

    Args:
        plan: Has the ops, and all that they work on.
        look_ahead: Buckets that have gather buffers at a time, the same as in the plan.
        wire_dtype: Of what travels.
        compute_dtype: Of Newton-Schulz.
        elementwise: Updates the parameters that are no matrices.
        has_momentum: Whether matrices keep a moving average of their gradients.

    Attributes:
        facts: Which branches of the program the last step took.
    """

    def __init__(
        self,
        plan: StepPlan,
        *,
        look_ahead: int,
        wire_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        elementwise: Elementwise = adamw_step_,
        has_momentum: bool = True,
    ) -> None:
        self.plan, self._elementwise, self._has_momentum = plan, elementwise, has_momentum
        self._compute_dtype, self._wire_dtype = compute_dtype, wire_dtype
        self._pool = BufferPool(wire_dtype, plan.device)
        self._in_step = [op for op in plan.ops if op.phase == IN_STEP]
        self._in_backward: dict[str, list[Op]] = {}
        for op in plan.ops:
            if op.phase == IN_BACKWARD:
                self._in_backward.setdefault(op.key, []).append(op)
        # Rolling buffers, on the way to the owners and back.
        self._slots = {
            key: (str(index % max(1, look_ahead)), str(index % scatter_buffers_for(look_ahead)))
            for index, key in enumerate(plan.buckets)
        }
        self._all_pieces: dict[str, BucketPieces] = {}
        self._transfers: dict[str, Transfer] = {}
        self._last_of = self._tensors_by_last_bucket()
        # Buckets whose momentum is in the state already in this step.
        self._committed: set[str] = set()
        self._gradients: Gradients = {}
        self._states: States = {}
        self._deferred_check: Callable[[], None] | None = None
        self._is_given_up = False
        self._numbers: Mapping[Tensor, float] = {}
        # Hyper-parameters as numbers; one that is a tensor is read once per step.
        self._options: dict[tuple[int, str], Any] = {}
        self.facts: Facts = {}
        self.executor = make_executor(
            {
                MOMENTUM: self._momentum,
                GATHER: self._gather,
                EARLY_MOMENTUM: self._momentum,
                EARLY_GATHER: self._gather,
                NEWTON_SCHULZ: self._newton_schulz,
                SCATTER: self._scatter,
                UPDATE: self._update,
                CHECK: self._check,
                ADAMW: self._adamw,
                **plan.part.actions,
            },
            plan.device,
        )

    @property
    def early_buckets(self) -> list[MatrixBucket]:
        """The buckets that may be sent during backward, in the order in which backward finishes them."""
        return [self.plan.buckets[key] for key in self._in_backward if key in self.plan.buckets]

    def run_in_backward(self, key: str, gradients: Gradients, states: States, *, packs: bool = True) -> None:
        """Send the look-ahead of a bucket to its owners before the step; every gradient of the bucket must be there.

        Without ``packs`` whatever is in the buffer is sent, for a bucket that will not count.

        Collective over the axes of the bucket's exchange group; every rank of it must call it, in the same order of
        buckets.
        """
        transfer = self._transfers[key] = self._transfer(key, self._pieces_of_all(key), is_early=True)
        with self.executor.memory_of_step():
            transfer.take_gather_buffers()
        with self._looking_at(gradients, states):
            for op in self._in_backward[key]:
                if packs or op.kind != EARLY_MOMENTUM:
                    self.executor.execute_early(op)

    def differs_from_sent(self, key: str, gradients: Gradients, states: States) -> Tensor:
        """Whether :meth:`run_in_backward` would now send other bits than it has sent; a bool on the device."""
        # On CUDA they were packed on a stream of their own.
        self.executor.wait(f"{EARLY_MOMENTUM}[{key}]")
        transfer = self._transfers[key]
        with self._looking_at(gradients, states):
            same = [
                equal
                for jobs, pieces in self._look_ahead_of(transfer, in_place=False)
                for equal in transfer.is_packed(jobs, pieces)
            ]
        if not same:
            return torch.zeros((), dtype=torch.bool, device=self._pool.device)
        return torch.stack(same).all().logical_not()

    def drop_sent(self, key: str) -> None:
        """Wait for an early gather whose result is not wanted, and give its buffers back."""
        self.executor.wait(f"{EARLY_GATHER}[{key}]")
        self._transfers.pop(key, None)
        self._pool.drop(_early_slot(key))

    def run(self, agreed: AgreedGradients, states: States) -> None:
        """Update every parameter that has a gradient.

        Collective over the axes of each exchange group; every rank of it must call it.

        Args:
            agreed: What all ranks know of the gradients.
            states: Of the optimizer.
        """
        self._gradients, self._states = agreed.gradients, states
        self._deferred_check, self._numbers = agreed.deferred_check, agreed.numbers
        self._is_given_up = agreed.is_given_up
        self._options.clear()
        self._committed.clear()
        taking_part = self._begin(agreed)
        of_part = self.plan.part.facts(agreed.gradients)
        self.facts = {
            **of_part,
            GRADIENTS: {*taking_part, *of_part.get(GRADIENTS, ())},
            SENT: {*agreed.sent, *of_part.get(SENT, ())},
            VALID: agreed.valid,
            DEFERRED: () if agreed.deferred_check is None else EVERY_KEY,
        }
        for op in self._in_step:
            if runs(op, self.facts):
                self.executor.execute(op)
        self._finish()

    def _finish(self) -> None:
        """Wait for what is on its way. Memory of gathers during backward, which is that of all buckets, is freed."""
        self.executor.finish()
        if any(transfer.slots[0] == _early_slot(key) for key, transfer in self._transfers.items()):
            self._pool.release(GATHER)
        self._gradients, self._states = {}, {}

    def _begin(self, agreed: AgreedGradients) -> set[str]:
        """Make the transfers ready; the buckets that take part."""
        taking_part: set[str] = set()
        for key, bucket in self.plan.buckets.items():
            if key not in agreed.valid:
                self._transfers[key] = self._transfer(key, self._pieces(bucket, agreed.gradients), is_early=False)
                self._transfers[key].take_gather_buffers()
            if self._transfers[key].pieces.taken:
                taking_part.add(key)
        return taking_part

    @contextmanager
    def _looking_at(self, gradients: Gradients, states: States) -> Generator[None]:
        """Inside, ops look at these, which they must not change."""
        before = self._gradients, self._states, self._options
        self._gradients, self._states, self._options = gradients, states, {}
        try:
            yield
        finally:
            self._gradients, self._states, self._options = before

    def _pieces_of_all(self, key: str) -> BucketPieces:
        """The calling rank's part in a bucket all of whose parameters have gradients."""
        if key not in self._all_pieces:
            bucket = self.plan.buckets[key]
            self._all_pieces[key] = BucketPieces(bucket.group, bucket.taken)
        return self._all_pieces[key]

    def _pieces(self, bucket: MatrixBucket, gradients: Gradients) -> BucketPieces:
        """The calling rank's part in a bucket, kept as long as the same parameters have gradients."""
        if all(tensor in gradients for tensor in bucket.tensors):
            return self._pieces_of_all(bucket.key)
        taken = tuple(index for index in bucket.taken if bucket.group.jobs[index].parameter.tensor in gradients)
        kept = self._transfers.get(bucket.key)
        return kept.pieces if kept is not None and kept.pieces.taken == taken else BucketPieces(bucket.group, taken)

    def _transfer(self, key: str, pieces: BucketPieces, *, is_early: bool) -> Transfer:
        """The transfer of a bucket, kept as long as the same jobs take part: views of buffers are costly to make."""
        slots = (_early_slot(key), self._slots[key][1]) if is_early else self._slots[key]
        kept = self._transfers.get(key)
        if kept is not None and kept.pieces is pieces and kept.slots == slots:
            return kept
        return Transfer(pieces, self._pool, slots)

    def _check(self, op: Op) -> Sequence[dist.Work]:
        """Wait for what must be known before anything changes."""
        del op
        assert self._deferred_check is not None
        try:
            self._deferred_check()
        except Exception:
            self._finish()  # The same on all ranks, so what is on its way arrives.
            raise
        self._deferred_check = None
        return ()

    def _adamw(self, op: Op) -> Sequence[dist.Work]:
        """Update the parameters of a batch that take part."""
        layout = self.plan.layout
        for group, tensors in self.plan.batches[int(op.key.partition(" ")[0])].by_group:
            tensors = [tensor for tensor in tensors if tensor in self._gradients]
            if tensors:
                self._elementwise(
                    [layout.local(tensor) for tensor in tensors],
                    [self._gradients[tensor] for tensor in tensors],
                    [self._states[tensor] for tensor in tensors],
                    group,
                    self._numbers,
                )
                layout.updated(tensors)
        return ()

    def _gather(self, op: Op) -> Sequence[dist.Work]:
        """Send the pieces to the owners."""
        transfer = self._transfers[op.key]
        leg = transfer.pieces.gather
        return leg.start(send=transfer.sent(leg), receive=transfer.received(leg), group=transfer.axes)

    def _scatter(self, op: Op) -> Sequence[dist.Work]:
        """Send the updates back to the ranks that hold the pieces."""
        transfer = self._transfers[op.key]
        leg = transfer.pieces.scatter
        return leg.start(send=transfer.sent(leg), receive=transfer.received(leg), group=transfer.axes)

    def _momentum(self, op: Op) -> Sequence[dist.Work]:
        """Look ahead on the local pieces and pack it; momentum in the state changes only if the step cannot stop."""
        if op.phase == IN_STEP and self._is_given_up:
            return ()
        in_place = op.phase == IN_STEP and self._deferred_check is None
        transfer = self._transfers[op.key]
        for jobs, pieces in self._look_ahead_of(transfer, in_place=in_place):
            transfer.pack(jobs, pieces)
        if in_place:
            self._committed.add(op.key)
        return ()

    def _look_ahead_of(
        self, transfer: Transfer, *, in_place: bool
    ) -> Iterator[tuple[Sequence[MatrixJob], Sequence[Tensor]]]:
        """What is to be orthogonalized of the calling rank's pieces, some jobs at a time."""
        for (momentum, nesterov), jobs in self._runs(transfer.jobs, "momentum", "nesterov"):
            if not self._has_momentum:
                yield jobs, self._grads(jobs)
                continue
            grads, buffers = self._grads_and_buffers(jobs)
            if in_place:
                foreach.lerp_(buffers, grads, 1 - momentum)
            else:
                buffers = foreach.lerp(buffers, grads, 1 - momentum)
            yield jobs, foreach.lerp(grads, buffers, momentum) if nesterov else buffers

    def _newton_schulz(self, op: Op) -> Sequence[dist.Work]:
        """Orthogonalize the owned matrices; small ones of equal shape as one batch."""
        if self._is_given_up:
            return ()
        transfer = self._transfers[op.key]
        batches = _batches(transfer.owned, self._pool.device.type)
        whole = [
            torch.empty(
                (len(batch), *transfer.owned[batch[0]].matrix.box.shape),
                dtype=self._wire_dtype,
                device=self._pool.device,
            )
            for batch in batches
        ]
        members = {
            index: matrices[place]
            for batch, matrices in zip(batches, whole, strict=True)
            for place, index in enumerate(batch)
        }
        transfer.unpack([members[index] for index in range(len(transfer.owned))])
        updates: dict[int, Tensor] = {}
        for batch, matrices in zip(batches, whole, strict=True):
            job = transfer.owned[batch[0]]
            update = orthogonalize(
                matrices.view(len(batch), job.matrix.rows, job.matrix.cols),
                coefficients=job.parameter.group["ns_coefficients"],
                num_steps=job.parameter.group["ns_steps"],
                eps=job.parameter.group["eps"],
                compute_dtype=self._compute_dtype,
            )
            updates.update(zip(batch, update.reshape(matrices.shape).unbind(), strict=True))
        transfer.pack_updates([updates[index] for index in range(len(transfer.owned))])
        return ()

    def _update(self, op: Op) -> Sequence[dist.Work]:
        """Decay and update the local pieces of a bucket's parameters, and their momentum if that is still to do."""
        transfer = self._transfers[op.key]
        if self._has_momentum and op.key not in self._committed:
            for (momentum,), jobs in self._runs(transfer.jobs, "momentum"):
                grads, buffers = self._grads_and_buffers(jobs)
                foreach.lerp_(buffers, grads, 1 - momentum)
        update_of = transfer.updates()
        for (lr, weight_decay, adjust_lr_fn), jobs in self._runs(transfer.jobs, "lr", "weight_decay", "adjust_lr_fn"):
            views = [job.local_view(job.parameter.local) for job in jobs]
            if self._pool.device.type == "cpu":
                for view in views:
                    # Not foreach.mul_: for bfloat16 on a CPU it rounds the factor to bfloat16, 0.998 to 0.9961.
                    view.mul_(1 - lr * weight_decay)
            else:
                foreach.mul_(views, 1 - lr * weight_decay)
            by_scale: dict[float, list[int]] = {}
            for index, job in enumerate(jobs):
                by_scale.setdefault(lr_scale(job.matrix.rows, job.matrix.cols, adjust_lr_fn), []).append(index)
            for scale, members in by_scale.items():
                updates = [update_of[jobs[index]] for index in members]
                add_scaled_([views[index] for index in members], updates, -(lr * scale))
        self.plan.layout.updated([tensor for tensor in self._last_of[op.key] if tensor in self._gradients])
        return ()

    def _tensors_by_last_bucket(self) -> dict[str, list[Tensor]]:
        """MatrixBucket -> the parameters that are done with its update, since it has the last of their matrices."""
        last = {
            tensor: op.key for op in self._in_step if op.kind == UPDATE for tensor in self.plan.buckets[op.key].tensors
        }
        found: dict[str, list[Tensor]] = {key: [] for key in self.plan.buckets}
        for tensor, key in last.items():
            found[key].append(tensor)
        return found

    def _runs(self, jobs: Sequence[MatrixJob], *keys: str) -> Iterator[tuple[tuple[Any, ...], Sequence[MatrixJob]]]:
        """Jobs to be treated together: those whose param groups have equal values for ``keys``.

        On a CPU one by one, so that what one operation writes is still in the cache for the next: on pieces of 0.5 to
        2 MB momentum and packing are 2.5 times faster.
        """
        by_group: dict[int, list[MatrixJob]] = {}
        for job in jobs:
            by_group.setdefault(id(job.parameter.group), []).append(job)
        by_values: dict[tuple[Any, ...], list[MatrixJob]] = {}
        for members in by_group.values():
            values = tuple(self._option(members[0].parameter.group, key) for key in keys)
            by_values.setdefault(values, []).extend(members)
        for values, members in by_values.items():
            if self._pool.device.type == "cpu":
                yield from ((values, [job]) for job in members)
            else:
                yield values, members

    def _option(self, group: ParamGroup, key: str) -> Any:
        if (id(group), key) not in self._options:
            self._options[id(group), key] = number(group[key], self._numbers)
        return self._options[id(group), key]

    def _grads(self, jobs: Sequence[MatrixJob]) -> list[Tensor]:
        return [job.local_view(self._gradients[job.parameter.tensor]) for job in jobs]

    def _grads_and_buffers(self, jobs: Sequence[MatrixJob]) -> tuple[list[Tensor], list[Tensor]]:
        """The calling rank's pieces of the gradients and of the momenta."""
        return (
            self._grads(jobs),
            [job.local_view(local_tensor(self._states[job.parameter.tensor]["momentum_buffer"])) for job in jobs],
        )


def _early_slot(key: str) -> str:
    """Buffers of its own for each bucket that is sent early, since all of them are on their way at once."""
    return f"early-{key}"


def _batches(jobs: Sequence[MatrixJob], device_type: str) -> list[list[int]]:
    """Positions of the jobs that are orthogonalized together."""
    batches: dict[Any, list[int]] = {}
    for index, job in enumerate(jobs):
        matrix, group = job.matrix, job.parameter.group
        if worth_batching(matrix.rows, matrix.cols, device_type):
            key = (matrix.box.shape, matrix.rows, tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])
        else:
            key = index
        batches.setdefault(key, []).append(index)
    return list(batches.values())
