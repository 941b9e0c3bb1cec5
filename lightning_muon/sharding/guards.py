"""Guards: objects that find mistakes of a program, beside what does the work."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_muon.comm.agreement import are_equal, both_signs, fail_together, gather, maxima_over
from lightning_muon.comm.collectives import axis_group, host_group
from lightning_muon.compat.torch import (
    forget_forward,
    has_unfinished_backward,
    has_unfinished_forward,
    is_in_backward,
    overwritten_weights,
    watch_gradients,
)
from lightning_muon.params.layers import clean_name
from lightning_muon.sharding.base import ShardingMode
from lightning_muon.sharding.units import UnitListener, fsdp_modules, fsdp_roots, original_class, own_places

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
ADVICE = (
    "FSDP2 gathers and reduces the weights of a unit on all ranks together, so all ranks must run the same units in "
    "the same order. Merge modules that only some ranks run into the unit around them, by a wrap_policy that does not "
    "choose them; or run them on every rank, with an input of zeros where there is none."
)


class Calls(NamedTuple):
    """The calls of a rank since its last step: their number, and the last of them."""

    count: int
    last: list[int]


class Guard(UnitListener):
    """Overrides the events of a training, and of FSDP2 units, that it wants to hear of.

    The engine calls each on all ranks alike, and so each may communicate, unless it is said to be local. What is found
    is raised.
    """

    def backward_begins(self) -> None:
        """Before a backward pass; local."""

    def gradients_are_finished(self) -> None:
        """After the reduction of gradients."""

    def clips(self) -> None:
        """Before gradients are clipped; local."""

    def steps(self) -> None:
        """Before a step of an optimizer; local."""

    def step_has_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """After a step of an optimizer."""

    def evaluation_has_ended(self) -> None:
        """After an evaluation on all ranks."""

    def failed(self, error: BaseException) -> None:
        """After an exception on this rank, which may be the only one; local."""

    def close(self) -> None:
        """At the end of the training on this rank; local."""


class CallLog(Guard):
    """Finds ranks that run different units: logs each that gathers weights, and each whose backward communicates.

    FSDP2 then exchanges messages of different units: it mixes weights of equal shape silently; those of different
    shapes hang. So all calls must be equal on all ranks of ``mesh``. Units on a mesh of other ranks are left out. With
    ``is_pipeline`` no backward pass communicates: gradients are reduced at the end.

    Digests are compared in the message that ends the backward passes of a step, and at the end of an evaluation; while
    ranks wait for each other, the watchdog compares the calls. Collective over ``mesh`` to construct.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, *, is_pipeline: bool = False) -> None:
        self._is_pipeline = is_pipeline
        self.step = 0  # How often the log was restarted.
        self.ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        self._everyone = axis_group(mesh, tuple(range(mesh.ndim)))
        self.host = host_group(self._everyone)  # The same ranks over gloo, which waits for no device.
        # Called after a call that did not follow the previous one the last time: if two ranks diverge, this happens on
        # at least one of them, before it communicates. gloo ends a process that gets a message of another size.
        self.on_new_order: Callable[[], None] = lambda: None
        self._successors: dict[int | None, int] = {}  # Call -> the one that followed it the last time.
        self._lock = threading.Lock()
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
        self.restart()

    # ---- what happens on this rank; local

    @override
    def enters(self, unit: FSDPModule) -> None:
        # Whole weights are not gathered again: each rank may run such a unit any number of times.
        if unit in self._numbers and self._is_sharded(unit):
            self._add(2 * self._numbers[unit])

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
            self._add(2 * self._numbers[unit] + 1)

    @override
    def clips(self) -> None:
        self._add(CLIP)

    @override
    def steps(self) -> None:
        self._add(STEP)

    def leaves_run(self) -> None:
        """This rank communicates no more."""
        self._add(LEFT)

    def _is_sharded(self, unit: FSDPModule) -> bool:
        return isinstance(getattr(*self._places[unit]), DTensor)

    def _add(self, call: int) -> None:
        with self._lock:
            self._count += 1
            self._last.append(call)
        self._digest.update(call.to_bytes(4, "little", signed=True))
        before = self._successors.get(self._previous)
        self._successors[self._previous] = self._previous = call
        if before != call and len(self.ranks) > 1:
            if before is not None:
                self.news = f"{self.text(call)} where it {self.text(before)} in earlier steps"
            self.on_new_order()

    def calls(self) -> Calls:
        """The calls of this step. From any thread."""
        with self._lock:
            return Calls(self._count, list(self._last))

    def restart(self) -> None:
        """Begin the log of the next step; the known order of calls is kept."""
        self.step += 1
        self.news = ""  # The last call of this step that another one has preceded in earlier steps.
        with self._lock:
            self._count, self._last = 0, deque[int](maxlen=_NUM_KEPT)
        self._previous: int | None = None
        self._digest = hashlib.sha256()

    # ---- comparison of the ranks

    def end_backward_passes(self) -> list[int]:
        """Log that this rank goes on to its next message, and return its digest to be sent there. Local.

        Four numbers for an all-reduce MAX over int32.
        """
        self._add(END)
        digest = self._digest.digest()
        return both_signs([int.from_bytes(digest[at : at + 4], "little") >> 1 for at in (0, 4)])

    def require_equal(self, maxima: Sequence[int]) -> None:
        """Begin a new log; raise on every rank if the maxima of what they have sent show that their units differ.

        Collective over the mesh if they do.
        """
        problem = None
        if not are_equal(maxima):
            gathered = gather(self.calls(), self._everyone)
            found = self.find_difference(dict(zip(self._everyone.ranks, gathered, strict=True)), complete=True)
            problem = found or f"The ranks run different units of the model. {ADVICE}"
        self.restart()
        if problem is not None:
            raise RuntimeError(problem)

    @override
    def gradients_are_finished(self) -> None:
        self.restart()

    @override
    def evaluation_has_ended(self) -> None:
        self.require_equal(maxima_over(self.host, self.end_backward_passes()))

    def find_difference(self, of_ranks: Mapping[int, Calls], *, complete: bool) -> str | None:
        """Describe the first difference, from the first call on that all ranks have kept; ``None`` without.

        If the calls are not ``complete``, a rank with fewer of them is only late.
        """
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
                return f"The ranks run different units of the model: {what}. {ADVICE}"
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


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', ...' if len(ranks) > 8 else ''} each"


class FailedPasses(Guard):
    """Marks a mode as failed when FSDP2 has noticed an exception in a pass that the program has caught."""

    def __init__(self, mode: ShardingMode) -> None:
        self._mode = mode

    @override
    def enters(self, unit: FSDPModule) -> None:
        if has_unfinished_backward(unit) and not is_in_backward():
            self._mode.pass_failed()
        self._mode.require_no_failure()

    @override
    def leaves(self, unit: FSDPModule) -> None:
        if not has_unfinished_forward(unit):
            return
        if is_in_backward():  # Checkpointing stops a unit that it computes again with an exception of its own.
            forget_forward(unit)
        else:
            self._mode.pass_failed()

    @override
    def evaluation_has_ended(self) -> None:
        self._mode.require_no_failure()


class SecondDerivatives(Guard):
    """Refuses ``create_graph=True``: FSDP2 frees the weights before the next backward pass needs them."""

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[nn.Module, str] = {child: name for name, child in module.named_modules()}

    @override
    def enters_backward(self, unit: FSDPModule) -> None:
        if torch.is_grad_enabled():
            assert isinstance(unit, nn.Module)
            raise RuntimeError(
                "a backward pass with create_graph=True (forces, a gradient penalty) reaches "
                f"{self._names.get(unit, '')!r} ({original_class(unit).__name__}), whose weights FSDP2 frees before "
                "the next one needs them; use sharding='zero2' or 'ddp'"
            )


class WrittenWeights(Guard):
    """Finds a program that writes to gathered weights, which FSDP2 frees next, so that the old values would stay.

    In the steps 0, 1, 2, 4, 8, ... only: it reads all weights of this rank, and waits for the device.
    """

    def __init__(self, module: nn.Module) -> None:
        self._roots, self._step = list(fsdp_roots(module)), 0

    @override
    def returns(self, unit: FSDPModule) -> None:
        if self._step & (self._step - 1) or torch.is_inference_mode_enabled():
            return
        if names := overwritten_weights(unit):
            raise RuntimeError(
                f"the program has written to {len(names)} gathered weights ({clean_name(names[0])}, ...), which FSDP2 "
                "throws away, so that the old values would stay. Change weights between steps (in on_train_batch_end "
                "of a Trainer, for example), not in training_step or a forward; or use sharding='zero2' or 'ddp', "
                "where each rank has all weights"
            )

    @override
    def backward_begins(self) -> None:
        for root in self._roots:  # Their weights stay whole from forward to backward.
            self.returns(root)

    @override
    def gradients_are_finished(self) -> None:
        self._step += 1


class SingleReduction(Guard):
    """Raises if a second backward pass of a step reduces gradients, where each pass divides by tokens of its own."""

    def __init__(self, parameters: Sequence[Tensor], has_gradient: Callable[[Tensor], bool], name: str) -> None:
        self._parameters, self._has_gradient, self._name = list(parameters), has_gradient, name
        self._num_passes = 0
        # Whether an earlier pass of this step, and the current one, reached a parameter; a loss of another module need
        # not reach any.
        self._was_reached = self._is_reached = self._has_begun = False
        self._unwatch = watch_gradients(self, self._parameters, SingleReduction._arrived)

    @override
    def backward_begins(self) -> None:
        # Without gradients, the program has dropped those of earlier passes.
        self._was_reached = self._was_reached and any(map(self._has_gradient, self._parameters))
        self._is_reached, self._has_begun = False, True

    @override
    def gradients_are_finished(self) -> None:
        if not self._has_begun:  # They were before.
            return
        if self._num_passes:
            error = None
            if self._was_reached and self._is_reached:
                error = RuntimeError(
                    f"a second backward pass of a step has added to the gradients of {self._name}, and each has "
                    "divided by tokens of its own (loss_scaling='tokens'); run all but the last inside of "
                    "no_backward_sync (no_sync, accumulate), or call zero_grad between them"
                )
            fail_together(error, None)
        self._num_passes += 1
        self._was_reached |= self._is_reached
        self._has_begun = False

    @override
    def step_has_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self._num_passes, self._was_reached = 0, False

    @override
    def close(self) -> None:
        self._unwatch()

    def _arrived(self, _: Tensor) -> None:
        self._is_reached = True
