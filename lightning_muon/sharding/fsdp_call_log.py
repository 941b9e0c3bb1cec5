"""The order in which this rank calls FSDP2 units, so that it can be compared with the order of the other ranks."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_muon.comm.agreement import gather, maxima_over
from lightning_muon.comm.groups import axis_group, backends, host_group
from lightning_muon.sharding.outputs import tensors_in
from lightning_muon.sharding.shard_model import fsdp_modules, original_class, own_places

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
# Words of a digest in :meth:`FsdpCallLog.digest_numbers`, and the value for words that a rank does not have.
DIGEST_SIZE = 4
NO_DIGEST = -(2**31)

Tail = tuple[int, list[int]]  # How many of the first calls are left out, and the other calls.


class Barrier(NamedTuple):
    """A point that ranks have to reach together before they communicate."""

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
        self._kept: deque[int] = deque(maxlen=_NUM_KEPT)
        self._digest = hashlib.sha256()

    def add(self, call: int) -> Barrier | None:
        """Append a call; return what to wait for if this order is new and there are other ranks."""
        with self._lock:
            self.count += 1
            self._kept.append(call)
        self._digest.update(call.to_bytes(4, "little", signed=True))
        self._num_ever += 1
        expected = self._successors.get(self._last) == call
        self._successors[self._last] = call
        self._last = call
        return None if expected or len(self._ranks) == 1 else Barrier(self.name, self._ranks, self._num_ever, call)

    def tail(self) -> Tail:
        """The last calls, and how many are left out before them. May be called from any thread."""
        with self._lock:
            return self.count - len(self._kept), list(self._kept)

    def digest_numbers(self) -> list[int]:
        """Two halves of the digest, 62 bits in all, each with its negative, whose maximum shows the minimum."""
        digest = self._digest.digest()
        first, second = (int.from_bytes(digest[at : at + 4], "little") >> 1 for at in (0, 4))
        return [first, -first, second, -second]

    def restart(self) -> None:
        """Empty the list; the known order of calls is kept."""
        with self._lock:
            self.count = 0
            self._kept.clear()
        self._digest = hashlib.sha256()


class FsdpCallLog:
    """Logs each unit that gathers its weights for a forward pass, and each whose backward pass communicates.

    If ranks run different units, FSDP2 exchanges messages of different units: it mixes weights of equal shape silently;
    those of different shapes hang. :attr:`all_calls` must be equal inside the shard group, whose ranks gather weights
    from each other; :attr:`crossing` has the backward passes, in which replicas reduce gradients together too, and must
    be equal on all of ``mesh``, (shard) or (replicate, shard). So replicas may evaluate different numbers of batches.
    Units on a mesh of other ranks are left out. With ``is_pipeline`` no backward pass communicates: gradients are
    reduced at the end, and each rank may have as many micro-batches as it likes. Collective over ``mesh``; every rank
    must construct it.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, *, is_pipeline: bool = False) -> None:
        self._is_pipeline = is_pipeline
        self.step = 0  # How often the log was restarted.
        self.uses_gloo = "gloo" in (backends(mesh.get_group(axis)).get(mesh.device_type) for axis in range(mesh.ndim))
        self.ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        self.everyone = axis_group(mesh, tuple(range(mesh.ndim)))
        self._host = host_group(self.everyone)  # The same ranks over gloo, which waits for no device.
        rows = mesh.mesh.reshape(-1, mesh.mesh.shape[-1]).tolist()
        self._num_replicas = len(rows)
        self._replica = next(index for index, row in enumerate(rows) if dist.get_rank() in row)
        # The ranks that hold one copy of the weights together, this rank among them.
        self.shard_ranks = tuple(sorted(rows[self._replica]))
        # Called before a collective that did not follow the previous call the last time. If two ranks diverge, this
        # happens on at least one of them; it then waits here for the others instead of sending messages that do not
        # match, on which gloo aborts.
        self.barrier: Callable[[Barrier], None] | None = None
        # Unit -> what to call when its backward pass begins, before FSDP2 knows.
        self.before_backward: dict[FSDPModule, Callable[[], None]] = {}
        self.all_calls = CallList(f"shard group of rank {self.shard_ranks[0]}", self.shard_ranks)
        self.crossing = CallList(f"mesh of rank {self.ranks[0]}", self.ranks)
        self._units: dict[FSDPModule, tuple[str, str]] = {}  # Name and class name of each unit, in order of numbers.
        self._hooks = ExitStack()
        names: dict[Any, str] = {child: name for name, child in module.named_modules()}
        for unit in fsdp_modules(module):
            places = own_places(unit)
            if places and getattr(*places[0]).device_mesh.size() == len(self.ranks):
                self._watch(unit, len(self._units), places[0])
                self._units[unit] = names[unit], original_class(unit).__name__  # type: ignore[arg-type]

    def mark(self, point: int) -> None:
        """Log that this rank does :data:`END`, :data:`CLIP`, :data:`STEP` or :data:`LEFT`; local."""
        self._add(point, crosses=True, waits=point != LEFT)

    def digest_numbers(self) -> list[int]:
        """Digests for an all-reduce MAX over int32: one over all ranks, then one for each shard group."""
        numbers = self.crossing.digest_numbers() + [NO_DIGEST] * (DIGEST_SIZE * self._num_replicas)
        start = DIGEST_SIZE * (1 + self._replica)
        numbers[start : start + DIGEST_SIZE] = self.all_calls.digest_numbers()
        return numbers

    @staticmethod
    def differs(numbers: Sequence[int]) -> bool:
        """Whether the maxima of :meth:`digest_numbers` over the ranks show different orders; empty places show none."""
        return any(numbers[at] not in (NO_DIGEST, -numbers[at + 1]) for at in range(0, len(numbers), 2))

    def compare(self) -> None:
        """Compare the calls as :meth:`require_equal` does. Collective over the mesh."""
        self.mark(END)
        self.require_equal(maxima_over(self._host, self.digest_numbers()))

    def require_equal(self, maxima: Sequence[int]) -> None:
        """Begin a new log; raise on every rank if the maxima of :meth:`digest_numbers` show that their units differ.

        Collective over the mesh if they do.
        """
        problem = None
        if self.differs(maxima):
            lists = ((self.shard_ranks[0], self.all_calls.tail()), (0, self.crossing.tail()))
            gathered = gather(lists, self.everyone)
            ranks = dist.get_process_group_ranks(self.everyone.group)
            found = self.find_difference(dict(zip(ranks, gathered, strict=True)), complete=True)
            problem = found or f"The ranks run different units of the model. {self.advice(())}"
        self.restart()
        if problem is not None:
            raise RuntimeError(problem)

    def find_difference(self, lists: Mapping[int, Sequence[tuple[Any, Tail]]], *, complete: bool) -> str | None:
        """Describe the first difference, if any; ``lists``: rank -> (name of the ranks to compare, tail) of both lists.

        If the calls are not ``complete``, a rank with fewer of them is only late.
        """
        compared: dict[tuple[int, Any], dict[int, Tail]] = {}
        for number in (0, 1):  # The calls of a shard group say more.
            for rank, of_rank in lists.items():
                name, tail = of_rank[number]
                compared.setdefault((number, name), {})[rank] = tail
        descriptions = (self._describe(tails, complete=complete) for tails in compared.values())
        return next((found for found in descriptions if found is not None), None)

    def _describe(self, tails: Mapping[int, Tail], *, complete: bool) -> str | None:
        """Describe the first difference, from the first call on that the tails of all ranks have; ``None`` without."""
        start = max((skipped for skipped, _ in tails.values()), default=0)
        for calls in zip_longest(*(kept[start - skipped :] for skipped, kept in tails.values())):
            found: dict[int | None, list[int]] = {}
            for rank, call in zip(tails, calls, strict=True):
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
        known = list(self._units)[unit] if isinstance(unit, int) else unit
        name, kind = self._units.get(known) or ("", original_class(known).__name__)  # type: ignore[arg-type]
        return f"{name!r} ({kind})" if name else f"the root {kind}"

    def advice(self, calls: Iterable[int | None]) -> str:
        """Advice on units that only some ranks run."""
        numbers = {call // 2 for call in calls if call is not None and call >= 0}
        units = [each for number, each in enumerate(self._units.values()) if number in numbers and each[0]]
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

    def restart(self) -> None:
        """Begin the log of the next step; local."""
        self.step += 1
        self.all_calls.restart()
        self.crossing.restart()

    def close(self) -> None:
        """Remove the hooks; local."""
        self._hooks.close()

    def _watch(self, unit: FSDPModule, number: int, place: tuple[nn.Module, str]) -> None:
        # On a mesh of one axis weights are gathered from all ranks, also where the other units have replicas.
        crosses = getattr(*place).device_mesh.ndim == 1
        gathers = crosses or len(self.shard_ranks) > 1
        num_begun = 0  # Number of backward passes, each through all earlier calls of the unit.

        def enter(*_: Any) -> None:
            # Whole weights are not gathered again: each rank may run such a unit any number of times.
            if gathers and isinstance(getattr(*place), DTensor):
                self._add(2 * number, crosses=crosses)

        def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            outputs = [tensor for tensor in tensors_in(output, set()) if tensor.requires_grad]
            if outputs:
                register_multi_grad_hook(outputs, partial(begin, num_begun), mode="any")

        def begin(current: int, _: Tensor) -> None:
            nonlocal num_begun
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"a backward pass with create_graph=True (forces, a gradient penalty) reaches {self.name(unit)}, "
                    "whose weights FSDP2 frees before the next one needs them; use sharding='zero2' or 'ddp'"
                )
            if unit in self.before_backward:
                self.before_backward[unit]()
            # FSDP2 reduces when the weights are freed; while they stay whole, further calls add to the same sum.
            if self._is_pipeline:
                return
            if current == num_begun or isinstance(getattr(*place), DTensor):
                num_begun = max(current + 1, num_begun)
                self._add(2 * number + 1, crosses=True)

        # Before FSDP2's own hooks, in which a rank may wait for ever.
        for hook, register in ((enter, "register_forward_pre_hook"), (leave, "register_forward_hook")):
            self._hooks.enter_context(getattr(unit, register)(torch.compiler.disable(hook), prepend=True))

    def _add(self, call: int, *, crosses: bool, waits: bool = True) -> None:
        barriers = [calls.add(call) for calls in ([self.crossing] if crosses else []) + [self.all_calls]]
        # The first one is that of the most ranks.
        barrier = next((barrier for barrier in barriers if barrier is not None), None)
        if waits and barrier is not None and self.barrier is not None:
            self.barrier(barrier)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', ...' if len(ranks) > 8 else ''} each"
