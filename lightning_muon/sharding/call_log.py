"""The order in which ranks run the FSDP2 units of a model: logged on each rank, and compared between them."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_muon.comm.agreement import gather, maxima_over
from lightning_muon.comm.groups import axis_group, host_group
from lightning_muon.sharding.guards import Guard
from lightning_muon.sharding.units import fsdp_modules, original_class, own_places

# Number of last calls that are kept for error messages: a step has a few for each unit, an evaluation any number.
_NUM_KEPT = 4096
# Calls that are no units: points that all ranks must reach in the same place of their order.
END, LEFT, CLIP, STEP = -2, -3, -4, -5
_TEXTS = {
    None: "runs nothing more",
    END: "ends the backward passes or the evaluation",
    LEFT: "ends the run",
    CLIP: "clips gradients",
    STEP: "steps the optimizer",
}
# Words of a digest in :meth:`CallLog.end_backward_passes`, and the value for words that a rank does not have.
_DIGEST_SIZE = 4
_NO_DIGEST = -(2**31)


class Calls(NamedTuple):
    """The calls of a rank since its last step: their number, and the last of them."""

    count: int
    last: list[int]


class _CallList:
    """Calls that some ranks must have in common."""

    def __init__(self) -> None:
        self._successors: dict[int | None, int] = {}  # Call -> the one that followed it the last time.
        self._lock = threading.Lock()
        self.restart()

    def add(self, call: int) -> tuple[bool, int | None]:
        """Append a call; whether the order is new, and what has followed the call before the last time, if anything."""
        with self._lock:
            self._count += 1
            self._last.append(call)
        self._digest.update(call.to_bytes(4, "little", signed=True))
        before = self._successors.get(self._previous)
        self._successors[self._previous] = self._previous = call
        return before != call, before

    def calls(self) -> Calls:
        """May be called from any thread."""
        with self._lock:
            return Calls(self._count, list(self._last))

    def digest_numbers(self) -> list[int]:
        """Two halves of a digest of all calls, 62 bits in all, each with its negative: its maximum is the minimum."""
        digest = self._digest.digest()
        first, second = (int.from_bytes(digest[at : at + 4], "little") >> 1 for at in (0, 4))
        return [first, -first, second, -second]

    def restart(self) -> None:
        """Empty the list; the known order of calls is kept."""
        with self._lock:
            self._count, self._last = 0, deque[int](maxlen=_NUM_KEPT)
        self._previous: int | None = None
        self._digest = hashlib.sha256()


class CallLog(Guard):
    """Finds ranks that run different units: logs each that gathers weights, and each whose backward communicates.

    FSDP2 then exchanges messages of different units: it mixes weights of equal shape silently; those of different
    shapes hang. All calls must be equal inside the shard group, whose ranks gather weights from each other; those that
    cross, the backward passes, in which replicas reduce gradients together too, must be equal on all of ``mesh``,
    (shard) or (replicate, shard). So replicas may evaluate different numbers of batches. Units on a mesh of other ranks
    are left out. With ``is_pipeline`` no backward pass communicates: gradients are reduced at the end, and each rank
    may have as many micro-batches as it likes.

    Digests are compared in the message that ends the backward passes of a step, and at the end of an evaluation; while
    ranks wait for each other, the watchdog compares the calls. Collective over ``mesh`` to construct.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, *, is_pipeline: bool = False) -> None:
        self._is_pipeline = is_pipeline
        self.step = 0  # How often the log was restarted.
        self.ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        self._everyone = axis_group(mesh, tuple(range(mesh.ndim)))
        self._host = host_group(self._everyone)  # The same ranks over gloo, which waits for no device.
        rows = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist()
        self._num_replicas = len(rows)
        self._replica = next(index for index, row in enumerate(rows) if dist.get_rank() in row)
        # The ranks that hold one copy of the weights together, this rank among them.
        self.shard_ranks = tuple(sorted(rows[self._replica]))
        self._all, self._crossing = _CallList(), _CallList()
        # Called after a call that did not follow the previous one the last time: if two ranks diverge, this happens on
        # at least one of them, before it communicates. gloo ends a process that gets a message of another size.
        self.on_new_order: Callable[[], None] = lambda: None
        self.news = ""  # The last such call in this step that another one has preceded in earlier steps.
        self.sums_replicas = True  # Whether backward passes reduce gradients between replicas.
        self._numbers: dict[FSDPModule, int] = {}
        self._names: list[tuple[str, str]] = []  # Name and class name of each unit, in order of numbers.
        self._places: dict[FSDPModule, tuple[nn.Module, str]] = {}  # One sharded parameter of each unit.
        self._is_counted: set[FSDPModule] = set()  # Units whose backward pass was logged since their last forward.
        names: dict[Any, str] = {child: name for name, child in module.named_modules()}
        for unit in fsdp_modules(module):
            places = own_places(unit)
            if places and getattr(*places[0]).device_mesh.size() == len(self.ranks):
                self._numbers[unit], self._places[unit] = len(self._names), places[0]
                self._names.append((names[unit], original_class(unit).__name__))  # type: ignore[arg-type]

    # ---- what happens on this rank; local

    @override
    def enters(self, unit: FSDPModule) -> None:
        # Whole weights are not gathered again: each rank may run such a unit any number of times.
        if unit in self._numbers and self._is_sharded(unit):
            # On a mesh of one axis weights are gathered from all ranks, also where the other units have replicas.
            crosses = getattr(*self._places[unit]).device_mesh.ndim == 1
            if crosses or len(self.shard_ranks) > 1:
                self._add(2 * self._numbers[unit], crosses=crosses)

    @override
    def returns(self, unit: FSDPModule) -> None:
        if torch.is_grad_enabled():
            self._is_counted.discard(unit)

    @override
    def enters_backward(self, unit: FSDPModule) -> None:
        # FSDP2 reduces when the weights are freed; while they stay whole, further calls add to the same sum.
        if unit not in self._numbers or self._is_pipeline:
            return
        if unit not in self._is_counted or self._is_sharded(unit):
            self._is_counted.add(unit)
            self._add(2 * self._numbers[unit] + 1, crosses=self.sums_replicas)

    @override
    def clips(self) -> None:
        self._add(CLIP, crosses=True)

    @override
    def steps(self) -> None:
        self._add(STEP, crosses=True)

    def leaves_run(self) -> None:
        """This rank communicates no more."""
        self._add(LEFT, crosses=True)

    def _is_sharded(self, unit: FSDPModule) -> bool:
        return isinstance(getattr(*self._places[unit]), DTensor)

    def _add(self, call: int, *, crosses: bool) -> None:
        is_new, before = self._all.add(call)
        if crosses:
            is_new |= self._crossing.add(call)[0]
        if is_new and len(self.ranks) > 1:
            if before not in (None, call):
                self.news = f"{self.text(call)} where it {self.text(before)} in earlier steps"
            self.on_new_order()

    def calls(self) -> tuple[Calls, Calls]:
        """All calls, and those that cross. From any thread."""
        return self._all.calls(), self._crossing.calls()

    # ---- comparison of the ranks

    def end_backward_passes(self) -> list[int]:
        """Log that this rank goes on to its next message, and return what it has to send there. Local.

        Digests for an all-reduce MAX over int32: one over all ranks, then one for each shard group.
        """
        self._add(END, crosses=True)
        numbers = self._crossing.digest_numbers() + [_NO_DIGEST] * (_DIGEST_SIZE * self._num_replicas)
        start = _DIGEST_SIZE * (1 + self._replica)
        numbers[start : start + _DIGEST_SIZE] = self._all.digest_numbers()
        return numbers

    def require_equal(self, maxima: Sequence[int]) -> None:
        """Begin a new log; raise on every rank if the maxima of what they have sent show that their units differ.

        Collective over the mesh if they do.
        """
        problem = None
        if any(maxima[at] not in (_NO_DIGEST, -maxima[at + 1]) for at in range(0, len(maxima), 2)):
            mine, crossing = self.calls()
            gathered = gather(((self.shard_ranks[0], mine), (0, crossing)), self._everyone)
            ranks = dist.get_process_group_ranks(self._everyone.group)
            found = self.find_difference(dict(zip(ranks, gathered, strict=True)), complete=True)
            problem = found or f"The ranks run different units of the model. {self.advice(())}"
        self.restart()
        if problem is not None:
            raise RuntimeError(problem)

    @override
    def gradients_are_finished(self) -> None:
        self.restart()

    @override
    def evaluation_has_ended(self) -> None:
        self.require_equal(maxima_over(self._host, self.end_backward_passes()))

    def restart(self) -> None:
        """Begin the log of the next step; local."""
        self.step += 1
        self.news = ""
        self._all.restart()
        self._crossing.restart()

    def find_difference(self, lists: Mapping[int, Sequence[tuple[Any, Calls]]], *, complete: bool) -> str | None:
        """Describe the first difference, if any; ``lists``: rank -> (name of those to compare, calls) of both lists.

        If the calls are not ``complete``, a rank with fewer of them is only late.
        """
        compared: dict[tuple[int, Any], dict[int, Calls]] = {}
        for number in (0, 1):  # The calls of a shard group say more.
            for rank, of_rank in lists.items():
                name, calls = of_rank[number]
                compared.setdefault((number, name), {})[rank] = calls
        descriptions = (self._describe(calls, complete=complete) for calls in compared.values())
        return next((found for found in descriptions if found is not None), None)

    def _describe(self, of_ranks: Mapping[int, Calls], *, complete: bool) -> str | None:
        """Describe the first difference, from the first call on that all ranks have kept; ``None`` without."""
        start = max((calls.count - len(calls.last) for calls in of_ranks.values()), default=0)
        kept = [calls.last[start - calls.count + len(calls.last) :] for calls in of_ranks.values()]
        for calls in zip_longest(*kept):
            found: dict[int | None, list[int]] = {}
            for rank, call in zip(of_ranks, calls, strict=True):
                if call is not None or complete:
                    found.setdefault(call, []).append(rank)
            if len(found) > 1:
                what = "; ".join(f"{_ranks(ranks)} {self.text(call)}" for call, ranks in found.items())
                if CLIP in found:
                    return f"Gradients are clipped on some ranks only: {what}. All ranks must clip, or none."
                return f"The ranks run different units of the model: {what}. {self.advice(found)}"
        return None

    def text(self, call: int | None) -> str:
        """Text of a call for a sentence about a rank, such as "runs 'layers.0' (Block)"."""
        if call is None or call < 0:
            return _TEXTS[call]
        unit = self.name(call // 2)
        return f"enters the backward pass of {unit}" if call % 2 else f"runs {unit}"

    def name(self, unit: int | FSDPModule) -> str:
        """Name of a unit for a sentence, such as "'layers.0' (Block)"."""
        number = unit if isinstance(unit, int) else self._numbers.get(unit)
        if number is None:
            return f"the root {original_class(unit).__name__}"  # type: ignore[arg-type]
        name, kind = self._names[number]
        return f"{name!r} ({kind})" if name else f"the root {kind}"

    def advice(self, calls: Iterable[int | None]) -> str:
        """Advice on units that only some ranks run."""
        numbers = {call // 2 for call in calls if call is not None and call >= 0}
        units = [each for number, each in enumerate(self._names) if number in numbers and each[0]]
        reason = (
            "FSDP2 gathers and reduces the weights of a unit on all ranks together, so all ranks must run the same "
            "units in the same order."
        )
        if not units:
            return reason
        kinds = ", ".join(sorted({kind for _, kind in units}))
        return (
            f"{reason} Merge modules that only some ranks run into the unit around them, where unused parameters get "
            f"zero gradients: pass a wrap_policy that does not choose them, a list of classes without {kinds} or a "
            f"function (name, module) -> bool that is False for {', '.join(repr(name) for name, _ in units)}; or run "
            "them on every rank, with an input of zeros where there is none."
        )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', ...' if len(ranks) > 8 else ''} each"
