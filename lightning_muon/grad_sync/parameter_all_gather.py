"""All-gather of updated parts of replicated parameters, bucket by bucket, while the next forward already runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from lightning_muon.comm.collectives import start_messages
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.compat import foreach
from lightning_muon.compat.hooks import ModuleHook
from lightning_muon.compat.torch import profiled
from lightning_muon.grad_sync.shard_map import BucketParts, ShardMap


class ParameterAllGather:
    """Gives every rank the parts of the parameters that other ranks have updated.

    In a step the caller says which parameters take part (:meth:`begin`), updates its own parts in place, says which
    have their new values (:meth:`updated`), so that whole buckets leave, and ends with :meth:`finish_updates`.

    Hooks wait for the values: in front of the forward of each unit and of the modules inside it, and in front of
    ``state_dict`` and ``load_state_dict`` of every module. Code that reads parameters in another way, for example a
    training step that uses a weight without a call of its module, must call :meth:`wait` or :meth:`wait_all` first.

    ``buckets`` have one dtype and device each, and are sent in order; ``units`` has for each unit the parameters that
    its forward may use outside of the units inside it; ``group`` is the shard axis. Local to construct.
    """

    def __init__(
        self,
        shard_map: ShardMap,
        buckets: Sequence[Sequence[Tensor]],
        units: Mapping[nn.Module, Collection[Tensor]],
        group: AxisGroup,
    ) -> None:
        self._group = group
        self.buckets = [[parameter for parameter in bucket if shard_map.is_sharded(parameter)] for bucket in buckets]
        self._bucket_of = {parameter: index for index, bucket in enumerate(self.buckets) for parameter in bucket}
        self._to_leave: dict[int, list[Tensor]] = {}
        self._updated: set[Tensor] = set()
        self.travelling: dict[int, _Travelling] = {}
        self._parts = lru_cache(1 << 12)(partial(BucketParts, shard_map=shard_map))
        self._hooks = ExitStack()
        self._register_hooks(units)

    def begin(self, participating: Collection[Tensor]) -> None:
        """Begin to update just these parameters, the same on all ranks; wait for the values of the last step."""
        if self._to_leave:
            raise RuntimeError(
                "the last step was broken off between its first update and finish_updates(), so parameters differ "
                "between ranks; load a checkpoint into a new process group"
            )
        self.wait_all()
        chosen = set(participating)
        members = [[parameter for parameter in bucket if parameter in chosen] for bucket in self.buckets]
        self._to_leave = {index: bucket for index, bucket in enumerate(members) if bucket}
        self._updated.clear()

    def updated(self, parameters: Collection[Tensor]) -> None:
        """Send the next buckets, in their order, as far as all that takes part has new values.

        Collective over the shard axis, in the same order of calls.
        """
        self._updated.update(parameters)
        while self._to_leave and self._updated.issuperset(self._to_leave[min(self._to_leave)]):
            self._send(min(self._to_leave))

    def finish_updates(self) -> None:
        """Send the remaining buckets. Collective over the shard axis once in a step."""
        for index in list(self._to_leave):
            self._send(index)

    def _send(self, index: int) -> None:
        members = self._to_leave.pop(index)
        if self._group.size > 1:
            with profiled("send_values", f"parameters.{index}"):
                self.travelling[index] = _Travelling(members, self._parts(tuple(members)), self._group)

    def wait(self, parameters: Iterable[Tensor]) -> None:
        """Wait for the new values of these parameters; on CUDA only the current stream waits."""
        self._wait(self._indices(parameters))

    def wait_all(self) -> None:
        """Wait for all new values; on CUDA only the current stream waits."""
        self._wait(range(len(self.buckets)))

    def close(self) -> None:
        """Wait for values on their way, and remove the hooks; raise if they do not arrive, as other ranks are gone."""
        self._hooks.close()
        if not self._to_leave:
            self.wait_all()

    def _wait(self, indices: Collection[int]) -> None:
        if not self.travelling and not self._to_leave:
            return
        if not self._to_leave.keys().isdisjoint(indices):
            raise RuntimeError("parameters are read while a step updates them; call finish_updates() first")
        for index in sorted(self.travelling.keys() & set(indices)):
            with profiled("wait_values", f"parameters.{index}"):
                self.travelling.pop(index).arrive()

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


class _Travelling:
    """One bucket on its way: each rank sends its parts to every other one, as one message."""

    @torch.no_grad()
    def __init__(self, members: list[Tensor], parts: BucketParts, group: AxisGroup) -> None:
        self._members = members
        pieces = parts.cut(parameter.detach().view(-1) for parameter in members)
        mine = [pieces[index] for index in parts.of_rank[group.rank]]
        # Must not change until the messages are done.
        self._sent = mine[0] if len(mine) == 1 else torch.cat(mine) if mine else torch.empty(0, device="cpu")
        theirs = {
            rank: [pieces[index] for index in indices]
            for rank, indices in enumerate(parts.of_rank)
            if indices and rank != group.rank
        }
        # A part that comes alone is received where it belongs.
        buffers = {
            rank: parts[0] if len(parts) == 1 else parts[0].new_empty(sum(part.numel() for part in parts))
            for rank, parts in theirs.items()
        }
        self._received = [(buffers[rank], parts) for rank, parts in theirs.items()]
        others = [rank for rank in range(group.size) if rank != group.rank] if mine else []
        self._works = start_messages(dict.fromkeys(others, self._sent), buffers, group)

    @torch.no_grad()
    def arrive(self) -> None:
        """Wait for the values and put them into the parameters; on CUDA the current stream waits."""
        for work in self._works:
            work.wait()
        packed = [(buffer, parts) for buffer, parts in self._received if len(parts) > 1]
        sources = [part for buffer, parts in packed for part in buffer.split([part.numel() for part in parts])]
        if packed:
            foreach.copy_([part for _, parts in packed for part in parts], sources)
        for buffer in (self._sent, *(buffer for buffer, _ in self._received)):
            if buffer.is_cuda:  # It may have been made on another stream, which must not use it again too early.
                buffer.record_stream(torch.cuda.current_stream(buffer.device))
        # Messages that are received in place are writes that autograd does not see.
        torch.autograd.graph.increment_version(self._members)
