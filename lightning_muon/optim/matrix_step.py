"""The Muon part of a step: what each op of the plan does. The order is the plan's, the waiting the executor's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon.comm.collectives import BufferPool
from lightning_muon.math.lr_scale import lr_scale
from lightning_muon.math.newton_schulz import orthogonalize, worth_batching
from lightning_muon.optim.elementwise import add_scaled_, number
from lightning_muon.optim.executor import make_executor
from lightning_muon.optim.step_plan import ExchangeGroup, MatrixJob, ParamGroup
from lightning_muon.optim.transfer import BucketPieces, Transfer
from lightning_muon.params.exchange import PlanOptions
from lightning_muon.params.layout import Layout, local_tensor
from lightning_muon.schedule.passes import prefetch, scatter_buffers_for
from lightning_muon.schedule.program import ADAMW, GATHER, MOMENTUM, NEWTON_SCHULZ, SCATTER, UPDATE, Op

States = dict[Tensor, dict[str, Any]]
Gradients = dict[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class MatrixBucket:
    """Matrices that travel together, and the buffers (slots) that they use on the way there and back."""

    key: str
    group: ExchangeGroup
    taken: tuple[int, ...]
    slots: tuple[str, str]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The parameters of the bucket, each once; equal on all ranks."""
        return list(dict.fromkeys(self.group.jobs[index].parameter.tensor for index in self.taken))

    @cached_property
    def pieces(self) -> BucketPieces:
        """The calling rank's part in the bucket, if all its parameters have gradients."""
        return BucketPieces(self.group, self.taken)


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What a step works on.

    ``verdict`` is called once, before weights or state change; it may raise. It fills ``numbers``, the values of
    hyper-parameters that are tensors on a device.
    """

    gradients: Gradients
    states: States
    adamw: Callable[[], None]
    verdict: Callable[[], None] | None
    numbers: Mapping[Tensor, float] = field(default_factory=dict[Tensor, float])
    options: dict[tuple[int, str], Any] = field(default_factory=dict[tuple[int, str], Any])

    def option(self, group: ParamGroup, key: str) -> Any:
        """A hyper-parameter as a number; one that is a tensor is read once per step."""
        if (id(group), key) not in self.options:
            self.options[id(group), key] = number(group[key], self.numbers)
        return self.options[id(group), key]


class MatrixStep:
    """Runs the plans of all exchange groups, always in the same order on every rank.

    A bucket's momentum and gather may be run early, from hooks of the backward pass (:meth:`start_early`): they read
    the state and do not change it, so that what they sent can be thrown away.
    """

    def __init__(
        self,
        groups: Sequence[ExchangeGroup],
        *,
        options: PlanOptions,
        wire_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        layout: Layout,
        device: torch.device,
        has_momentum: bool = True,
    ) -> None:
        self._layout, self._has_momentum = layout, has_momentum
        self._compute_dtype, self._wire_dtype = compute_dtype, wire_dtype
        self._pool = BufferPool(wire_dtype, device)
        self._look_ahead = 0 if options.overlap == "off" else options.look_ahead
        self._ops = _ops_of_this_rank(groups, self._look_ahead)
        self._by_name = {op.name: op for op in self._ops}
        self.buckets = {bucket.key: bucket for bucket in _buckets(groups, self._look_ahead)}
        self._transfers: dict[str, Transfer] = {}
        self._last_of = self._tensors_by_last_bucket()
        # Buckets whose momentum is in the state already in this step.
        self._committed: set[str] = set()
        self._inputs: _Inputs | None = None
        self.executor = make_executor(
            {
                MOMENTUM: self._momentum,
                GATHER: lambda op: self._transfers[op.key].start_gather(),
                NEWTON_SCHULZ: self._newton_schulz,
                SCATTER: lambda op: self._transfers[op.key].start_scatter(),
                UPDATE: self._update,
                ADAMW: self._adamw,
            },
            device,
        )

    @property
    def gathered_buckets(self) -> list[MatrixBucket]:
        """The buckets that travel to their owners, in the order in which backward finishes them."""
        return [bucket for key, bucket in self.buckets.items() if f"{GATHER}[{key}]" in self._by_name]

    def start_early(self, key: str, gradients: Gradients, states: States, *, packs: bool = True) -> None:
        """Send the look-ahead of a bucket to its owners before the step; every gradient of the bucket must be there.

        Without ``packs`` whatever is in the buffer is sent, for a bucket that will not count.

        Collective over the axes of the bucket's exchange group; every rank of it must call it, in the same order of
        buckets.
        """
        self._transfers[key] = self._transfer(key, self.buckets[key].pieces, is_early=True)
        with self.executor.memory_of_step():
            self._transfers[key].take_gather_buffers()
        self._inputs = _Inputs(gradients, states, adamw=lambda: None, verdict=lambda: None)
        for kind in (MOMENTUM, GATHER) if packs else (GATHER,):
            self.executor.execute_early(self._by_name[f"{kind}[{key}]"])
        self._inputs = None

    def differs_from_early(self, key: str, gradients: Gradients, states: States) -> Tensor:
        """Whether :meth:`start_early` would now send other bits than it has sent; a bool on the device."""
        # On CUDA they were packed on a stream of their own.
        self.executor.wait(f"{MOMENTUM}[{key}]")
        before, self._inputs = self._inputs, _Inputs(gradients, states, adamw=lambda: None, verdict=lambda: None)
        transfer = self._transfers[key]
        same = [
            equal
            for jobs, pieces in self._look_ahead_of(transfer, in_place=False)
            for equal in transfer.is_packed(jobs, pieces)
        ]
        self._inputs = before
        if not same:
            return torch.zeros((), dtype=torch.bool, device=self._pool.device)
        return torch.stack(same).all().logical_not()

    def drop_early(self, key: str) -> None:
        """Wait for an early gather whose result is not wanted, and give its buffers back."""
        self.executor.wait(f"{GATHER}[{key}]")
        self._transfers.pop(key, None)
        self._pool.drop(_early_slot(key))

    def run(
        self,
        gradients: Gradients,
        states: States,
        *,
        adamw: Callable[[], None],
        valid_early: frozenset[str] = frozenset(),
        verdict: Callable[[], None] | None = None,
        numbers: Mapping[Tensor, float] | None = None,
    ) -> None:
        """Update every matrix that has a gradient, and call ``adamw`` once while the first buckets are on their way.

        Collective over the axes of each exchange group; every rank of it must call it, with the same set of parameters
        in ``gradients`` and the same ``valid_early``.

        Args:
            gradients: Local gradient of each parameter that takes part.
            states: Of the optimizer.
            adamw: Updates all other parameters.
            valid_early: Buckets that :meth:`start_early` has sent, with what is still the gradient.
            verdict: Called before anything changes, as late as possible; raises, on all ranks, to give up the step.
            numbers: Values of hyper-parameters that are tensors on a device, once ``verdict`` has been called.
        """
        self._inputs = _Inputs(gradients, states, adamw, verdict, {} if numbers is None else numbers)
        self._committed.clear()
        for key, bucket in self.buckets.items():
            if key not in valid_early:
                self._transfers[key] = self._transfer(key, self._pieces(bucket, gradients), is_early=False)
                self._transfers[key].take_gather_buffers()
        for op in self._in_order(valid_early):
            if op.kind in (ADAMW, UPDATE) and self._inputs.verdict is not None:
                self._ask(self._inputs.verdict)
            self.executor.execute(op)
        self._finish()

    def _in_order(self, valid_early: frozenset[str]) -> list[Op]:
        """The ops with anything to do. AdamW gives way to all that changes nothing, if that can go on without waiting.

        That is so with a verdict to wait for, or where gradients are still on their way.
        """
        assert self._inputs is not None
        ops = [
            op
            for op in self._ops
            if op.kind == ADAMW
            or (self._transfers[op.key].pieces.taken and not (op.key in valid_early and op.kind in (MOMENTUM, GATHER)))
        ]
        if self._inputs.verdict is not None or self._layout.arrives_late:
            adamw = [op for op in ops if op.kind == ADAMW]
            ops = [op for op in ops if op.kind != ADAMW]
            first_update = next((index for index, op in enumerate(ops) if op.kind == UPDATE), len(ops))
            ops[first_update:first_update] = adamw
        return ops

    def _ask(self, verdict: Callable[[], None]) -> None:
        assert self._inputs is not None
        try:
            verdict()
        except Exception:
            self._finish()  # The same on all ranks, so what is on its way arrives.
            raise
        self._inputs = replace(self._inputs, verdict=None)

    def _finish(self) -> None:
        """Wait for what is on its way. Memory of gathers during backward, which is that of all buckets, is freed."""
        self.executor.finish()
        if any(transfer.slots[0] == _early_slot(key) for key, transfer in self._transfers.items()):
            self._pool.release(GATHER)
        self._inputs = None

    def _pieces(self, bucket: MatrixBucket, gradients: Gradients) -> BucketPieces:
        """The calling rank's part in a bucket, kept as long as the same parameters have gradients."""
        if all(tensor in gradients for tensor in bucket.tensors):
            return bucket.pieces
        taken = tuple(index for index in bucket.taken if bucket.group.jobs[index].parameter.tensor in gradients)
        kept = self._transfers.get(bucket.key)
        return kept.pieces if kept is not None and kept.pieces.taken == taken else BucketPieces(bucket.group, taken)

    def _transfer(self, key: str, pieces: BucketPieces, *, is_early: bool) -> Transfer:
        """The transfer of a bucket, kept as long as the same jobs take part: views of buffers are costly to make."""
        bucket = self.buckets[key]
        slots = (_early_slot(key), bucket.slots[1]) if is_early else bucket.slots
        kept = self._transfers.get(key)
        if kept is not None and kept.pieces is pieces and kept.slots == slots:
            return kept
        return Transfer(pieces, self._pool, slots)

    def _momentum(self, op: Op) -> Sequence[dist.Work]:
        """Look ahead on the local pieces and pack it; momentum in the state changes only if the step cannot stop."""
        assert self._inputs is not None
        in_place = self._inputs.verdict is None
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
                torch._foreach_lerp_(buffers, grads, 1 - momentum)
            else:
                buffers = torch._foreach_lerp(buffers, grads, 1 - momentum)
            yield jobs, torch._foreach_lerp(grads, buffers, momentum) if nesterov else buffers

    def _newton_schulz(self, op: Op) -> Sequence[dist.Work]:
        """Orthogonalize the owned matrices; small ones of equal shape as one batch."""
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
                torch._foreach_lerp_(buffers, grads, 1 - momentum)
        update_of = transfer.updates()
        for (lr, weight_decay, adjust_lr_fn), jobs in self._runs(transfer.jobs, "lr", "weight_decay", "adjust_lr_fn"):
            views = [job.local_view(job.parameter.local) for job in jobs]
            if self._pool.device.type == "cpu":
                for view in views:
                    # Not torch._foreach_mul_: for bfloat16 on a CPU it rounds the factor to bfloat16, 0.998 to 0.9961.
                    view.mul_(1 - lr * weight_decay)
            else:
                torch._foreach_mul_(views, 1 - lr * weight_decay)
            by_scale: dict[float, list[int]] = {}
            for index, job in enumerate(jobs):
                by_scale.setdefault(lr_scale(job.matrix.rows, job.matrix.cols, adjust_lr_fn), []).append(index)
            for scale, members in by_scale.items():
                updates = [update_of[jobs[index]] for index in members]
                add_scaled_([views[index] for index in members], updates, -(lr * scale))
        assert self._inputs is not None
        self._layout.updated([tensor for tensor in self._last_of[op.key] if tensor in self._inputs.gradients])
        return ()

    def _tensors_by_last_bucket(self) -> dict[str, list[Tensor]]:
        """MatrixBucket -> the parameters that are done with its update, since it has the last of their matrices."""
        last = {tensor: op.key for op in self._ops if op.kind == UPDATE for tensor in self.buckets[op.key].tensors}
        found: dict[str, list[Tensor]] = {key: [] for key in self.buckets}
        for tensor, key in last.items():
            found[key].append(tensor)
        return found

    def _runs(self, jobs: Sequence[MatrixJob], *keys: str) -> Iterator[tuple[tuple[Any, ...], Sequence[MatrixJob]]]:
        """Jobs to be treated together: those whose param groups have equal values for ``keys``.

        On a CPU one by one, so that what one operation writes is still in the cache for the next: on pieces of 0.5 to
        2 MB momentum and packing are 2.5 times faster.
        """
        assert self._inputs is not None
        by_group: dict[int, list[MatrixJob]] = {}
        for job in jobs:
            by_group.setdefault(id(job.parameter.group), []).append(job)
        by_values: dict[tuple[Any, ...], list[MatrixJob]] = {}
        for members in by_group.values():
            values = tuple(self._inputs.option(members[0].parameter.group, key) for key in keys)
            by_values.setdefault(values, []).extend(members)
        for values, members in by_values.items():
            if self._pool.device.type == "cpu":
                yield from ((values, [job]) for job in members)
            else:
                yield values, members

    def _adamw(self, op: Op) -> Sequence[dist.Work]:
        del op
        assert self._inputs is not None
        self._inputs.adamw()
        return ()

    def _grads(self, jobs: Sequence[MatrixJob]) -> list[Tensor]:
        assert self._inputs is not None
        return [job.local_view(self._inputs.gradients[job.parameter.tensor]) for job in jobs]

    def _grads_and_buffers(self, jobs: Sequence[MatrixJob]) -> tuple[list[Tensor], list[Tensor]]:
        """The calling rank's pieces of the gradients and of the momenta."""
        assert self._inputs is not None
        states = self._inputs.states
        return (
            self._grads(jobs),
            [job.local_view(local_tensor(states[job.parameter.tensor]["momentum_buffer"])) for job in jobs],
        )


def _ops_of_this_rank(groups: Sequence[ExchangeGroup], look_ahead: int) -> list[Op]:
    ops = [op for group in groups for op in group.plan.program[group.axes.rank]]
    adamw = Op(kind=ADAMW, key="", rank=0)
    return prefetch({0: [*ops, adamw]}, look_ahead, scatter_buffers=scatter_buffers_for(look_ahead))[0]


def _buckets(groups: Sequence[ExchangeGroup], look_ahead: int) -> Iterator[MatrixBucket]:
    """All buckets in the order of the step, with the rolling buffers that they use in it."""
    number = 0
    for group_number, group in enumerate(groups):
        for bucket_number, taken in enumerate(group.plan.buckets):
            slots = (str(number % max(1, look_ahead)), str(number % scatter_buffers_for(look_ahead)))
            yield MatrixBucket(f"{group_number}.{bucket_number}", group, taken, slots)
            number += 1


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
