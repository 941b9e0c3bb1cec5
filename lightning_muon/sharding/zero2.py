"""ZeRO-2: whole weights on every rank, gradients and optimizer state in shards.

A bucket goes down as gradients and comes up as values: hooks of backward send gradients to the ranks that update them,
an optimizer updates the calling rank's parts, and new values are sent back while the next forward already runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_muon.comm.collectives import start_all_reduce_sum, start_all_to_all, start_messages
from lightning_muon.compat import foreach
from lightning_muon.compat.torch import ModuleHook, profiled
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulzOptions
from lightning_muon.params.layout import AxisPlacement, Layout, PlacedState, matrices_in
from lightning_muon.sharding.base import attach_optimizers, is_attachable, names_of
from lightning_muon.sharding.ddp import Ddp, GradientBucket, Parameters, flat_gradient
from lightning_muon.sharding.shards import MainWeights, ShardMap, has_main, main_dtype, place_shards
from lightning_muon.sharding.units import find_units, units_of


class Bucket(GradientBucket):
    """Parameters whose gradients go to the ranks that update them, and whose new values come back; used in each step.

    All ranks call :meth:`reduce`, :meth:`advance` and :meth:`gradients`, and :meth:`send_values` and
    :meth:`wait_values`.

    The gradients are reduced by an all-to-all over the shard axis and sums on the receiving rank, then by an all-reduce
    over the replicas. Measured on gloo it takes a half to a quarter of the time of ``reduce_scatter_tensor``; it takes
    parts of any size without padding, and the order of the additions does not depend on the backend.
    """

    kind = "reduce_scatter"

    def __init__(self, parameters: Parameters, shards: ShardMap) -> None:
        super().__init__(parameters)
        self._shards, self._stream = shards, shards.side_stream(parameters[0].device)
        self._splits: list[list[int]] = []  # Elements of the parts of each parameter.
        # For each rank the indices, among the parts of all parameters, of those that it updates.
        self._of_rank: list[list[int]] = [[] for _ in range(shards.shard.size)]
        self._own = [shards.boxes[parameter][shards.shard.rank] for parameter in parameters]
        self._replicated: set[int] = set()  # Indices of parts that all ranks update.
        sizes: list[int] = []
        for parameter in parameters:
            # Rows follow each other in the order of the ranks, or are one box that all ranks hold.
            boxes = shards.boxes[parameter]
            different = list(dict.fromkeys(box for box in boxes if box.numel))
            for rank, box in enumerate(boxes):
                if box.numel:
                    self._of_rank[rank].append(len(sizes) + different.index(box))
            if not shards.is_sharded(parameter):
                self._replicated.add(len(sizes))
            self._splits.append([box.numel for box in different] or [0])
            sizes += self._splits[-1]
        self._counts = [sum(sizes[index] for index in indices) for indices in self._of_rank]

    def _cut(self, flattened: Iterable[Tensor]) -> list[Tensor]:
        """Views of the parts of all ranks in flat tensors, one for each parameter."""
        pieces: list[Tensor] = []
        for tensor, sizes in zip(flattened, self._splits, strict=True):
            pieces.extend(tensor.split(sizes) if len(sizes) > 1 else (tensor,))
        return pieces

    @override
    def reduce(self, gradients: Sequence[Tensor | None]) -> None:
        group, pieces = self._shards.shard, self._cut(map(flat_gradient, self.parameters, gradients))
        empty = pieces[0].new_empty(0)
        self._sum = torch.cat([pieces[index] for index in self._of_rank[group.rank]] or [empty])
        self._shares: tuple[Tensor, ...] = ()  # What is sent to the other ranks, and a row from each of them.
        self._works: list[dist.Work] = []
        self._is_added_up = False
        if group.group is not None:
            others = [index for rank, indices in enumerate(self._of_rank) for index in indices if rank != group.rank]
            sent, received = list(self._counts), [self._sum.numel()] * group.size
            sent[group.rank] = received[group.rank] = 0
            send = torch.cat([pieces[index] for index in others] or [empty])
            receive = self._sum.new_empty(sum(received))
            self._shares = send, receive.view(group.size - 1, -1)
            self._works = start_all_to_all(send, sent, receive, received, group)

    @override
    def advance(self, *, wait: bool = False) -> bool:
        is_ready = wait or self._stream is not None or all(work.is_completed() for work in self._works)
        if is_ready and not self._is_added_up:
            self._add_up()
        return self._is_added_up

    def _add_up(self) -> None:
        """Add what has arrived, and start the sum over the replicas, if there are any."""
        shares, self._shares = self._shares, ()
        with _on(self._stream, self._sum, *shares):
            for work in self._works:
                work.wait()
            self._works = []
            if shares and self._sum.numel():
                self._sum = _sum_in_order(self._sum, list(shares[1]), self._shards.shard.rank)
            self._sum = self._sum.to(main_dtype(self._sum))
            if self._shards.replicate.group is not None:
                self._works = [start_all_reduce_sum(self._sum, self._shards.replicate)]
            self._is_added_up = True
        self._added = None if self._stream is None else self._stream.record_event()

    @override
    def gradients(self, divisor: float) -> list[Tensor]:
        for work in self._works:
            work.wait()
        total = self._sum
        del self._sum, self._works  # The memory is freed with the gradients.
        if self._added is not None:
            stream = torch.cuda.current_stream(total.device)
            stream.wait_event(self._added)
            total.record_stream(stream)
        if divisor != 1:
            total.div_(divisor)
        pieces = total.split([box.numel for box in self._own])
        return [piece.view(box.shape) for piece, box in zip(pieces, self._own, strict=True)]

    @torch.no_grad()
    def send_values(self) -> None:
        """Begin to send the calling rank's parts to every other one. Collective over the shard axis."""
        group, pieces = self._shards.shard, self._cut(parameter.detach().view(-1) for parameter in self.parameters)
        of_rank = [[pieces[index] for index in indices if index not in self._replicated] for indices in self._of_rank]
        mine = of_rank[group.rank]
        theirs = {rank: parts for rank, parts in enumerate(of_rank) if parts and rank != group.rank}
        # A part that comes alone is received where it belongs.
        received = {
            rank: parts[0] if len(parts) == 1 else parts[0].new_empty(sum(part.numel() for part in parts))
            for rank, parts in theirs.items()
        }
        others = [rank for rank in range(group.size) if rank != group.rank]
        # Must not change until the messages are done.
        self._sent = dict.fromkeys(others, mine[0] if len(mine) == 1 else torch.cat(mine)) if mine else {}
        self._received = [(received[rank], parts) for rank, parts in theirs.items()]
        self._messages = start_messages(self._sent, received, group)

    @torch.no_grad()
    def wait_values(self) -> None:
        """Wait for what others have sent, and put it into the parameters. Local; on CUDA the current stream waits."""
        for work in self._messages:
            work.wait()
        packed = [(buffer, parts) for buffer, parts in self._received if len(parts) > 1]
        sources = [part for buffer, parts in packed for part in buffer.split([part.numel() for part in parts])]
        if packed:
            foreach.copy_([part for _, parts in packed for part in parts], sources)
        for buffer in {*self._sent.values(), *(buffer for buffer, _ in self._received)}:
            if buffer.is_cuda:  # It may have been made on another stream, which must not use it again too early.
                buffer.record_stream(torch.cuda.current_stream(buffer.device))
        # Messages that are received in place are writes that autograd does not see.
        torch.autograd.graph.increment_version(self.parameters)
        del self._sent, self._received, self._messages


@contextmanager
def _on(stream: torch.cuda.Stream | None, *tensors: Tensor) -> Iterator[None]:
    """Context on the stream, after work queued on the current one; ``tensors`` stay alive until it is done."""
    if stream is None:
        yield
        return
    for tensor in tensors:
        tensor.record_stream(stream)
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def _sum_in_order(own: Tensor, others: Sequence[Tensor], rank: int) -> Tensor:
    """Sum the shares of all ranks in rank order, 16-bit floats in float32; ``own`` may be overwritten."""
    if own.dtype.itemsize < 4:
        own, others = own.float(), [other.float() for other in others]
    before, after = others[:rank], others[rank:]
    if before:
        first, *rest = before
        for other in rest:
            first += other
        own += first
    for other in after:
        own += other
    return own


class Zero2Layout(Layout):
    """Tells an optimizer to update the calling rank's parts only, and sends them to the other ranks.

    A step says which parameters take part (:meth:`begin_step`), updates its own parts in place, says which have their
    new values (:meth:`updated`), so that whole buckets leave, and ends with :meth:`end_step`.

    Hooks wait for the values: in front of the forward of each unit and of the modules inside it, and in front of
    ``state_dict`` and ``load_state_dict`` of every module. Code that reads parameters in another way, for example a
    training step that uses a weight without a call of its module, must call :meth:`wait` or :meth:`wait_all` first.

    State is whole on owners for the step, and in DTensors that are sharded by rows, as those of FSDP2, for checkpoints.

    ``buckets`` have one dtype and device each, and are sent in order; ``units`` has for each unit the parameters that
    its forward may use outside of the units inside it. With ``waits`` a step ends when all new values are there. Local
    to construct.
    """

    def __init__(
        self,
        shards: ShardMap,
        buckets: Sequence[Sequence[Tensor]],
        units: Mapping[nn.Module, Collection[Tensor]],
        mains: MainWeights,
        *,
        waits: bool,
    ) -> None:
        super().__init__(shards.mesh)
        self._shards, self._mains, self._waits = shards, mains, waits
        self._sums: dict[Tensor, Tensor] = {}  # The parts of the gradients that any rank has; equal keys on all ranks.
        self._buckets = [[parameter for parameter in bucket if shards.is_sharded(parameter)] for bucket in buckets]
        self._bucket_of = {parameter: index for index, bucket in enumerate(self._buckets) for parameter in bucket}
        self._bucket = lru_cache(1 << 12)(lambda *parameters: Bucket(parameters, shards))
        self._updating: Collection[Tensor] = ()
        self._updated: set[Tensor] = set()
        # By index the buckets that leave in this step, and those whose values are on their way.
        self._to_leave: dict[int, list[Tensor]] = {}
        self.travelling: dict[int, Bucket] = {}
        self._hooks = ExitStack()
        self._register_hooks(units)

    @override
    def mesh_and_placements(self, parameter: Tensor) -> tuple[DeviceMesh, tuple[AxisPlacement, ...]]:
        return self._shards.mesh, self._shards.placements(parameter)

    @override
    def local(self, parameter: Tensor) -> Tensor:
        part = self._mains.part(parameter)
        return self._shards.local(parameter) if part is None else part

    @override
    def dtype(self, parameter: Tensor) -> torch.dtype:
        return main_dtype(parameter)

    @override
    def has_gradient(self, parameter: Tensor) -> bool:
        return parameter in self._sums

    @override
    def gradient(self, parameter: Tensor) -> Tensor | None:
        return self._sums.get(parameter)

    def add_gradients(self, sums: Mapping[Tensor, Tensor]) -> None:
        """Add the calling rank's parts of these gradients to those since :meth:`forget`. Local, alike on all ranks."""
        for parameter, part in sums.items():
            self._sums[parameter] = self._sums[parameter] + part if parameter in self._sums else part

    @override
    def forget(self, parameters: Collection[Tensor]) -> None:
        for parameter in parameters:
            self._sums.pop(parameter, None)

    @override
    def begin_step(self, parameters: Collection[Tensor]) -> None:
        """Begin to update just these parameters, the same on all ranks; wait for the values of the last step."""
        if self._to_leave:
            raise RuntimeError(
                "the last step was broken off between its first update and its end, so parameters differ between "
                "ranks; load a checkpoint into a new process group"
            )
        self.wait_all()
        self._mains.follow(parameters)
        self._updating, chosen = parameters, set(parameters)
        members = [[parameter for parameter in bucket if parameter in chosen] for bucket in self._buckets]
        self._to_leave = {index: bucket for index, bucket in enumerate(members) if bucket}
        self._updated.clear()

    @override
    def updated(self, parameters: Collection[Tensor]) -> None:
        """Send the next buckets, in their order, as far as all that takes part has new values.

        Collective over the shard axis, in the same order of calls.
        """
        self._updated.update(parameters)
        while self._to_leave and self._updated.issuperset(self._to_leave[min(self._to_leave)]):
            self._send(min(self._to_leave))

    @override
    def end_step(self) -> None:
        """Send the remaining buckets, drop used gradients; wait if ``waits``. Collective over the shard axis."""
        for index in list(self._to_leave):
            self._send(index)
        self._mains.round(each for each in self._updating if each not in self._bucket_of)
        self.forget(self._updating)
        if self._waits:
            self.wait_all()

    def _send(self, index: int) -> None:
        bucket = self._bucket(*self._to_leave.pop(index))
        self._mains.round(bucket.parameters)
        if self._shards.shard.size > 1:
            with profiled("send_values", f"parameters.{index}"):
                bucket.send_values()
            self.travelling[index] = bucket

    def wait(self, parameters: Iterable[Tensor]) -> None:
        """Wait for the new values of these parameters. Local; on CUDA only the current stream waits."""
        self._wait(self._indices(parameters))

    def wait_all(self) -> None:
        """Wait for all new values. Local; on CUDA only the current stream waits."""
        self._wait(range(len(self._buckets)))

    def close(self) -> None:
        """Wait for values on their way, and remove the hooks; raise if they do not arrive, as other ranks are gone."""
        self._hooks.close()
        if not self._to_leave:
            self.wait_all()

    def _wait(self, indices: Collection[int]) -> None:
        if not self.travelling and not self._to_leave:
            return
        if not self._to_leave.keys().isdisjoint(indices):
            raise RuntimeError("parameters are read while a step updates them; let optimizer.step() end first")
        for index in sorted(self.travelling.keys() & set(indices)):
            with profiled("wait_values", f"parameters.{index}"):
                self.travelling.pop(index).wait_values()

    def _register_hooks(self, units: Mapping[nn.Module, Collection[Tensor]]) -> None:
        indices = {unit: self._indices(parameters) for unit, parameters in units.items()}
        everything = {module: None for unit in units for module in unit.modules()}
        for unit, parameters in units.items():
            for module in unit.modules():
                if module not in units:
                    indices.setdefault(module, set()).update(self._indices(set(parameters) & set(module.parameters())))
        # Tracing would fix in the graph which buckets are on their way.
        wait_all = ModuleHook(lambda *_: self.wait_all(), "nothing")
        for module, mine in indices.items():
            if mine:
                hook = ModuleHook(lambda *_, mine=mine: self._wait(mine), "call" if module in units else "nothing")
                self._hooks.enter_context(module.register_forward_pre_hook(hook, prepend=True))
        for module in everything:
            self._hooks.enter_context(module.register_state_dict_pre_hook(wait_all))
            self._hooks.enter_context(module.register_load_state_dict_pre_hook(wait_all))

    def _indices(self, parameters: Iterable[Tensor]) -> set[int]:
        return {self._bucket_of[parameter] for parameter in parameters if parameter in self._bucket_of}

    @override
    def zeros_like(self, parameter: Tensor) -> Tensor:
        zeros = torch.zeros_like(self._shards.local(parameter), dtype=self.dtype(parameter))
        return self._shards.laid_out(parameter, zeros, tuple(parameter.shape))

    @override
    def zeros_of_neurons(self, parameter: Tensor, shape: tuple[int, ...], kept: Collection[int]) -> Tensor:
        zeros = torch.zeros(shape, dtype=torch.float32, device=parameter.device)
        return self._shards.laid_out(parameter, self._shards.local(parameter, zeros).clone(), shape)

    @override
    def saved(self, states: Sequence[PlacedState]) -> list[Tensor]:
        return self._shards.saved(states)

    @override
    def loaded(self, states: Sequence[PlacedState]) -> list[Tensor]:
        return self._shards.loaded(states)


class Zero2(Ddp):
    """Whole weights; gradients and optimizer state in shards over the last axis of the mesh.

    The gradient of a matrix is reduced to its owner, which orthogonalizes it without a gather; those of all others are
    sharded by rows. New values are sent back while the next forward already runs.

    Source: Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5 (stage 2); here with whole matrices as parts.
    """

    name = "zero2"
    parameters_arrive_late = True
    takes = frozenset({"bucket_bytes", "wrap_policy"})
    _zero2_layout: Zero2Layout | None = None
    _root_parameters: Sequence[Tensor] = ()

    @override
    def prepare(self, module: nn.Module) -> None:
        super().prepare(module)
        self._mains = MainWeights.of(module, self.mesh)
        if any(map(has_main, module.parameters())):  # Rows of what a checkpoint has, until owners are chosen.
            self._mains.divide(ShardMap(self.mesh, place_shards(list(module.parameters()), {}, self.mesh.size(-1))))

    @override
    def attach(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        used = [optimizer for optimizer in optimizers if any(group["params"] for group in optimizer.param_groups)]
        for optimizer in used:
            if not is_attachable(optimizer):
                raise ValueError(
                    f"sharding='zero2' divides the gradients that {type(optimizer).__name__} reads whole; use "
                    "ParallelMuon (with algorithm='adamw' for AdamW alone), or sharding='fsdp' or 'ddp'"
                )
        parameters = list(names_of(module).values())
        matrices = _flops_of_whole_matrices(used)
        shards = ShardMap(self.mesh, place_shards(parameters, matrices, self.mesh.size(-1)))
        reducer = self.reduce_by(lambda members: Bucket(members, shards), module)
        units = units_of(module, find_units(module, self.options.wrap_policy))
        self._root_parameters = units[module]
        # A step first updates buckets without matrices, such as the embedding, which the next forward needs first.
        buckets = sorted(reducer.buckets, key=lambda bucket: not matrices.keys().isdisjoint(bucket))
        waits = self.options.wait_for_parameters
        self.layout = self._zero2_layout = Zero2Layout(shards, buckets, units, self._mains, waits=waits)
        self.layout.has_sums = self.has_sums
        self._mains.divide(shards)
        self._mains.follow(parameter for parameter in parameters if parameter.requires_grad)
        attach_optimizers(module, used, self.layout)

    @override
    def keep(self, sums: Mapping[Tensor, Tensor]) -> None:
        self.attached(self._zero2_layout).add_gradients(sums)

    @override
    def begin_forward(self) -> None:
        super().begin_forward()
        # Parameters in no unit have no forward that waits for them.
        if self._zero2_layout is not None:
            self._zero2_layout.wait(self._root_parameters)

    @override
    def finish_parameters(self) -> None:
        if self._zero2_layout is not None:
            self._zero2_layout.wait_all()

    @override
    def close(self) -> None:
        super().close()
        closing, self._zero2_layout, self.layout = self._zero2_layout, None, Layout()
        if closing is not None:
            self._mains.close()
            # Waits for values on their way; raises if they do not arrive, because other ranks are gone.
            closing.close()


def _flops_of_whole_matrices(optimizers: Sequence[Any]) -> dict[Tensor, int]:
    """Parameters that one rank must own -> FLOPs of their step; not stacks, whose rows are whole matrices."""
    found: dict[Tensor, int] = {}
    for optimizer in optimizers:
        routes = iter(optimizer.routes)
        for group in optimizer.param_groups:
            for parameter, route in zip(group["params"], routes, strict=False):
                matrices = matrices_in(tuple(parameter.shape), route)
                options, arithmetic = NewtonSchulzOptions.of(group), Arithmetic(parameter.device.type, torch.bfloat16)
                flops = sum(options.flops(rows, cols, arithmetic) for _, rows, cols in matrices)
                if flops and route.kind != "stack":
                    found[parameter] = flops
    return found
