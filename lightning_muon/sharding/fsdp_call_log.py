"""The order in which this rank calls FSDP2 units, so that it can be compared with the order of the other ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_muon.comm.groups import AxisGroup, backends
from lightning_muon.comm.step_agreement import maxima_over
from lightning_muon.sharding.fsdp_runtime import fsdp_modules, own_places

# At least so many last calls are kept for messages: a step has a few for each unit, an evaluation any number.
_NUM_KEPT = 4096


class Barrier(NamedTuple):
    """What ranks have to reach together before they communicate."""

    name: str  # Names the ranks; the same on all of them.
    ranks: tuple[int, ...]  # Global ranks that have to come, in ascending order.
    number: int  # How many calls these ranks have logged in total.
    call: int  # The last of them.


class CallList:
    """Calls that some ranks must have in common: a digest of all of them, and the last ones."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.count = 0
        self.name, self._ranks = name, ranks
        self._num_ever = 0
        self._last: int | None = None
        self._successors: dict[int | None, int] = {}
        self._lock = threading.Lock()
        self._kept = array("i")
        self._digest = hashlib.sha256()

    def add(self, call: int) -> Barrier | None:
        """Append a call; return what to wait for if this order is new and there are other ranks."""
        with self._lock:
            self.count += 1
            self._kept.append(call)
            if len(self._kept) >= 2 * _NUM_KEPT:
                del self._kept[:_NUM_KEPT]
        self._digest.update(call.to_bytes(4, "little", signed=True))
        self._num_ever += 1
        expected = self._successors.get(self._last) == call
        self._successors[self._last] = call
        self._last = call
        return None if expected or len(self._ranks) == 1 else Barrier(self.name, self._ranks, self._num_ever, call)

    def tail(self) -> tuple[int, list[int]]:
        """Return (number of calls left out, the others)."""
        with self._lock:
            return self.count - len(self._kept), self._kept.tolist()

    def words(self) -> list[int]:
        """Two words of the digest, each with its negative, whose maximum shows the minimum.

        62 bits: of 4e18 different orders one is taken for equal by chance.
        """
        digest = self._digest.digest()
        first, second = (int.from_bytes(digest[at : at + 4], "little") >> 1 for at in (0, 4))
        return [first, -first, second, -second]

    def restart(self) -> None:
        """Begin anew; what followed what stays known."""
        with self._lock:
            self.count = 0
            self._kept = array("i")
        self._digest = hashlib.sha256()


Mark = Literal["end", "left"]
_MARKS: dict[Mark, tuple[int, str]] = {
    "end": (-2, "ends the step or the evaluation"),
    "left": (-3, "ends the run"),
}
_TEXTS = dict(_MARKS.values())
# Of a digest in :meth:`FsdpCallLog.words`, and what stands in the place of those that a rank does not have.
NUM_WORDS = 4
NO_WORD = -(2**31)


class FsdpCallLog:
    """Logs each unit that gathers its weights for a forward pass, and each whose backward pass communicates.

    FSDP2 communicates unit by unit. If one rank runs another unit than the others, or none, messages of different units
    meet: weights of equal shape are mixed in silence, those of different shapes hang. So there are two lists of calls.
    One holds all calls; it must be equal inside the shard group, whose ranks gather weights from each other. The other
    holds the backward passes, in which replicas reduce gradients together too; it must be equal on all ranks. So
    replicas may evaluate different numbers of batches. :meth:`compare` compares both lists. Units on a mesh that does
    not span all ranks of ``mesh`` (experts that the user has spread over ranks) are left out. Local.

    Args:
        module: A model with units.
        mesh: 1-D (shard), or 2-D (replicate, shard).

    Attributes:
        step: How often the log was started anew.
        uses_gloo: Whether units communicate over gloo.
        shard_ranks: The ranks that hold one copy of the weights together, this rank among them.
        barrier: Called before communication when this order of units is new: when this call did not follow the one
            before it the last time. Ranks with equal logs until then expect the same call, so if ranks differ, at least
            one of them calls this. It waits for the other ranks and so keeps messages of different sizes from meeting,
            which would end a process that uses gloo.
        before_backward: Unit -> what to call when its backward pass begins, before FSDP2 knows.

    Example::

        log = FsdpCallLog(model, mesh)
        model(batch).sum().backward()
        log.compare(everyone, host)
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.step = 0
        self.uses_gloo = "gloo" in (backends(mesh.get_group(axis)).get(mesh.device_type) for axis in range(mesh.ndim))
        self.ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        rows = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist()
        self._num_replicas = len(rows)
        self._replica = next(index for index, row in enumerate(rows) if dist.get_rank() in row)
        self.shard_ranks = tuple(sorted(rows[self._replica]))
        self.barrier: Callable[[Barrier], None] | None = None
        self.before_backward: dict[FSDPModule, Callable[[], None]] = {}
        self._all = CallList(f"shard group of rank {self.shard_ranks[0]}", self.shard_ranks)
        self._crossing = CallList(f"mesh of rank {self.ranks[0]}", self.ranks)
        self._names: list[tuple[str, str]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        names = {id(child): name for name, child in module.named_modules()}
        for unit in fsdp_modules(module):
            places = own_places(unit)
            if places and getattr(*places[0]).device_mesh.size() == len(self.ranks):
                self._watch(unit, places[0])
                self._names.append((names[id(unit)], _class_name(unit)))

    def mark(self, what: Mark) -> None:
        """Note a point that all ranks must reach in the same place of their order; local."""
        self._add(_MARKS[what][0], crosses=True, waits=what != "left")

    @property
    def barrier_names(self) -> tuple[str, ...]:
        """What :attr:`Barrier.name` may be on this rank."""
        return self._all.name, self._crossing.name

    def position(self) -> tuple[int, int]:
        """How far this rank is: (step, number of calls in it). May be called from any thread."""
        return self.step, self._all.count

    def calls(self) -> tuple[int, list[int]]:
        """The calls of this step: (number of calls left out, the others). May be called from any thread."""
        return self._all.tail()

    def crossing_calls(self) -> tuple[int, list[int]]:
        """The calls of this step that communicate between replicas too, as :meth:`calls` gives them."""
        return self._crossing.tail()

    def words(self) -> list[int]:
        """Digests for an all-reduce MAX over int32: one over all ranks, then one for each shard group."""
        words = self._crossing.words() + [NO_WORD] * (NUM_WORDS * self._num_replicas)
        start = NUM_WORDS * (1 + self._replica)
        words[start : start + NUM_WORDS] = self._all.words()
        return words

    @staticmethod
    def differs(words: Sequence[int]) -> bool:
        """Whether the maxima of :meth:`words` over the ranks show different orders; places left empty show none."""
        return any(words[at] not in (NO_WORD, -words[at + 1]) for at in range(0, len(words), 2))

    def compare(self, everyone: AxisGroup, host: AxisGroup) -> None:
        """Compare the calls and begin a new log. Collective over the mesh; every rank must call it.

        Args:
            everyone: The ranks of the mesh.
            host: The same with a gloo group, so that no device is waited for.

        Raises:
            RuntimeError: On every rank, if the ranks have run different units.
        """
        self.mark("end")
        self.require_equal(maxima_over(host, self.words()), everyone)

    def require_equal(self, maxima: Sequence[int], everyone: AxisGroup) -> None:
        """Begin a new log, if the maxima of :meth:`words` over the ranks show that all ranks have made the same calls.

        Collective over the mesh if they do; every rank must call it.

        Raises:
            RuntimeError: On every rank, if the ranks have run different units.
        """
        problem = self.explain(everyone.group) if self.differs(maxima) else None
        self.restart()
        if problem is not None:
            raise RuntimeError(problem)

    def explain(self, group: dist.ProcessGroup | None) -> str:
        """Name the first unit that differs. Collective over ``group``; every rank must call it."""
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (self.shard_ranks[0], self.calls(), self.crossing_calls()), group=group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        of_shards: dict[int, dict[int, tuple[int, list[int]]]] = {}
        for rank, (shard, calls, _) in zip(ranks, gathered, strict=True):
            of_shards.setdefault(shard, {})[rank] = calls
        crossing = {rank: calls for rank, (_, _, calls) in zip(ranks, gathered, strict=True)}
        for compared in [*of_shards.values(), crossing]:
            found = self.describe_tails(compared, complete=True)
            if found is not None:
                return found
        return f"The ranks run different units of the model. {self.advice(())}"

    def describe_tails(self, tails: Mapping[int, tuple[int, Sequence[int]]], *, complete: bool) -> str | None:
        """As :meth:`describe`, from the first call that no rank has left out: rank -> (number left out, the others)."""
        start = max((skipped for skipped, _ in tails.values()), default=0)
        return self.describe(
            {rank: calls[start - skipped :] for rank, (skipped, calls) in tails.items()}, complete=complete
        )

    def describe(self, calls: Mapping[int, Sequence[int]], *, complete: bool) -> str | None:
        """Compare the calls of ranks; ``None`` if there is no difference.

        Args:
            calls: Rank -> its calls.
            complete: Whether the calls have come to their end. Otherwise a rank with fewer calls is only late.
        """
        longest = max(map(len, calls.values()), default=0)
        for index in range(longest):
            found: dict[int | None, list[int]] = {}
            for rank, mine in calls.items():
                call = mine[index] if index < len(mine) else None
                if call is not None or complete:
                    found.setdefault(call, []).append(rank)
            if len(found) > 1:
                what = "; ".join(f"{_ranks(ranks)} {self.text(call)}" for call, ranks in found.items())
                return f"The ranks run different units of the model: {what}. {self.advice(found)}"
        return None

    def text(self, call: int | None) -> str:
        """What a rank does, as part of a sentence."""
        if call is None:
            return "runs nothing more"
        if call < 0:
            return _TEXTS[call]
        name, kind = self._names[call // 2]
        unit = f"{name!r} ({kind})" if name else f"the root {kind}"
        return f"enters the backward pass of {unit}" if call % 2 else f"runs {unit}"

    def advice(self, calls: Sequence[int | None] | Mapping[int | None, Any]) -> str:
        """What to do about units that only some ranks run."""
        units = sorted({call // 2 for call in calls if call is not None and call >= 0 and self._names[call // 2][0]})
        names = [self._names[unit][0] for unit in units]
        kinds = sorted({self._names[unit][1] for unit in units})
        reason = (
            "FSDP2 gathers and reduces the weights of a unit on all ranks together, so all ranks must run the same "
        )
        reason += "units in the same order."
        if not names:
            return reason
        return (
            f"{reason} Merge modules that only some ranks run into the unit around them, where unused parameters get "
            f"zero gradients: pass a wrap_policy that does not choose them, a list of classes "
            f"without {', '.join(kinds)} or a function (name, module) -> bool that is False for "
            f"{', '.join(map(repr, names))}; or run them on every rank, with an input of zeros where there is none."
        )

    def restart(self) -> None:
        """Begin the log of the next step; local."""
        self.step += 1
        self._all.restart()
        self._crossing.restart()

    def close(self) -> None:
        """Remove the hooks; local."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _watch(self, unit: FSDPModule, place: tuple[nn.Module, str]) -> None:
        number = len(self._names)
        # On a mesh of one axis weights are gathered from all ranks, also where the other units have replicas.
        crosses = getattr(*place).device_mesh.ndim == 1
        gathers = crosses or len(self.shard_ranks) > 1
        passes = [_BackwardPass()]

        def enter(*_: Any) -> None:
            # Weights that are whole already are not gathered: such a unit may run as often as a rank likes.
            if gathers and isinstance(getattr(*place), DTensor):
                self._add(2 * number, crosses=crosses)

        def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            outputs = [tensor for tensor in tensors_in(output, set()) if tensor.requires_grad]
            if outputs:
                if passes[0].has_begun:
                    passes[0] = _BackwardPass()
                register_multi_grad_hook(outputs, partial(begin, passes[0]), mode="any")

        def begin(current: _BackwardPass, _: Tensor) -> None:
            if unit in self.before_backward:
                self.before_backward[unit]()
            # FSDP2 reduces when the weights are freed; as long as they stay whole, further calls add to the same sum.
            if not current.has_begun or isinstance(getattr(*place), DTensor):
                current.has_begun = True
                self._add(2 * number + 1, crosses=True)

        # Before FSDP2's own hooks, in which a rank may wait for ever.
        for hook, register in ((enter, "register_forward_pre_hook"), (leave, "register_forward_hook")):
            self._hooks.append(getattr(unit, register)(torch.compiler.disable(hook), prepend=True))

    def _add(self, call: int, *, crosses: bool, waits: bool = True) -> None:
        barriers = [calls.add(call) for calls in ([self._crossing] if crosses else []) + [self._all]]
        # The first one is that of the most ranks.
        barrier = next((barrier for barrier in barriers if barrier is not None), None)
        if waits and barrier is not None and self.barrier is not None:
            self.barrier(barrier)


@dataclasses.dataclass
class _BackwardPass:
    """One backward pass through all calls of a unit that came before it."""

    has_begun: bool = False


def tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in what a module returns; ``seen`` holds the containers on the way, which may be in a cycle."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        entries = list(value.values())
    elif isinstance(value, list | tuple):
        entries = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        return
    if id(value) not in seen:
        seen.add(id(value))
        for entry in entries:
            yield from tensors_in(entry, seen)


def _class_name(unit: FSDPModule) -> str:
    """The class that the module had before ``fully_shard`` swapped it."""
    return next(base.__name__ for base in type(unit).__mro__ if not issubclass(base, FSDPModule))


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', ...' if len(ranks) > 8 else ''} each"
