"""The order in which this rank runs the units of a sharded model, to be compared with that of the other ranks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_muon.sharding.runtime import fsdp_modules, own_places

Mark = Literal["step", "end", "left"]
_MARKS: dict[Mark, tuple[int, str]] = {
    "step": (-1, "starts a training step"),
    "end": (-2, "ends the step"),
    "left": (-3, "ends the training"),
}
_TEXTS = dict(_MARKS.values())


class UnitOrder:
    """Notes each unit that gathers its weights for a forward pass, and each whose backward pass begins.

    FSDP2 communicates unit by unit. Where one rank runs another unit than the others, or none, messages of different
    units meet: weights of equal shape are mixed in silence, others hang. So the notes of all ranks must be equal, and
    are compared by :class:`lightning_muon.sharding.gradients.GradientAgreement` before weights change. Units on a mesh
    that does not span ``num_ranks`` ranks (experts that the user has spread over ranks) are left out. Local.

    Attributes:
        step: How often the notes were started anew.
        gate: Called with (number of notes ever, note) before anything is communicated, where the note is not the one
            that followed its predecessor the last time. Ranks with equal notes until then expect the same, so of ranks
            that part at least one calls it. A gate that waits for all ranks keeps messages of different sizes from
            meeting, which ends a process that uses gloo.
        before_backward: Unit -> what to call when its backward pass begins, before FSDP2 knows.

    Example::

        order = UnitOrder(model, dist.get_world_size())
        model(batch).sum().backward()
        if order.differs(words_of_all_ranks):
            raise RuntimeError(order.explain(group))
        order.restart()
    """

    def __init__(self, module: nn.Module, num_ranks: int) -> None:
        self.step = 0
        self.num_ranks = num_ranks
        self.gate: Callable[[int, int], None] | None = None
        self.before_backward: dict[FSDPModule, Callable[[], None]] = {}
        self._num_notes = 0
        self._last: int | None = None
        self._successors: dict[int | None, int] = {}
        self._notes = array("i")
        self._names: list[tuple[str, str]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        names = {id(child): name for name, child in module.named_modules()}
        for unit in fsdp_modules(module):
            places = own_places(unit)
            if places and getattr(*places[0]).device_mesh.size() == num_ranks:
                self._watch(unit, places[0])
                self._names.append((names[id(unit)], _class_name(unit)))

    def mark(self, what: Mark) -> None:
        """Note a point that all ranks must reach in the same place of their order; local."""
        note, _ = _MARKS[what]
        if what == "left":
            self._notes.append(note)
        else:
            self._add(note)

    def position(self) -> tuple[int, int]:
        """How far this rank is: (step, number of notes in it). May be called from any thread."""
        return self.step, len(self._notes)

    def notes(self) -> list[int]:
        """The notes of this step. May be called from any thread."""
        return self._notes.tolist()

    def words(self) -> list[int]:
        """A digest for an all-reduce MAX over int32: each word and its negative, whose maximum shows the minimum.

        62 bits: of 4e18 different orders one is taken for equal by chance.
        """
        digest = hashlib.sha256(self._notes.tobytes()).digest()
        first, second = (int.from_bytes(digest[at : at + 4], "little") >> 1 for at in (0, 4))
        return [first, -first, second, -second]

    @staticmethod
    def differs(words: Sequence[int]) -> bool:
        """Whether the maxima of :meth:`words` over the ranks show different orders."""
        return words[0] != -words[1] or words[2] != -words[3]

    def explain(self, group: dist.ProcessGroup | None) -> str:
        """Name the first unit that differs. Collective over ``group``; every rank must call it."""
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, self.notes(), group=group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        return self.describe(dict(zip(ranks, gathered, strict=True)), complete=True) or "the ranks run different units"

    def describe(self, notes: Mapping[int, Sequence[int]], *, complete: bool) -> str | None:
        """Compare the notes of ranks; ``None`` if there is no difference.

        Args:
            notes: Rank -> its notes.
            complete: Whether the notes have come to their end. Otherwise a rank with fewer notes is only late.
        """
        longest = max(map(len, notes.values()), default=0)
        for index in range(longest):
            found: dict[int | None, list[int]] = {}
            for rank, mine in notes.items():
                note = mine[index] if index < len(mine) else None
                if note is not None or complete:
                    found.setdefault(note, []).append(rank)
            if len(found) > 1:
                what = "; ".join(f"{_ranks(ranks)} {self.text(note)}" for note, ranks in found.items())
                return f"The ranks run different units of the model: {what}. {self.advice(found)}"
        return None

    def text(self, note: int | None) -> str:
        """What a rank does, as part of a sentence."""
        if note is None:
            return "runs nothing more"
        if note < 0:
            return _TEXTS[note]
        name, kind = self._names[note // 2]
        unit = f"{name!r} ({kind})" if name else f"the root {kind}"
        return f"enters the backward pass of {unit}" if note % 2 else f"runs {unit}"

    def advice(self, notes: Sequence[int | None] | Mapping[int | None, Any]) -> str:
        """What to do about units that only some ranks run."""
        units = sorted({note // 2 for note in notes if note is not None and note >= 0 and self._names[note // 2][0]})
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
        """Begin the notes of the next step; local."""
        self.step += 1
        self._notes = array("i")

    def close(self) -> None:
        """Remove the hooks; local."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _watch(self, unit: FSDPModule, place: tuple[nn.Module, str]) -> None:
        number = len(self._names)

        def enter(*_: Any) -> None:
            # Weights that are whole already are not gathered: such a unit may run as often as a rank likes.
            if isinstance(getattr(*place), DTensor):
                self._add(2 * number)

        def leave(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
            if outputs and torch.is_grad_enabled():
                register_multi_grad_hook(outputs, self._backward_note(number, unit), mode="any")

        # Before FSDP2's own hooks, in which a rank may wait for ever.
        for hook, register in ((enter, "register_forward_pre_hook"), (leave, "register_forward_hook")):
            self._hooks.append(getattr(unit, register)(torch.compiler.disable(hook), prepend=True))

    def _backward_note(self, number: int, unit: FSDPModule) -> Callable[[Tensor], None]:
        def begin(_: Tensor) -> None:
            if unit in self.before_backward:
                self.before_backward[unit]()
            self._add(2 * number + 1)

        return begin

    def _add(self, note: int) -> None:
        self._notes.append(note)
        self._num_notes += 1
        expected = self._successors.get(self._last) == note
        self._successors[self._last] = note
        self._last = note
        if not expected and self.gate is not None:
            self.gate(self._num_notes, note)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a module returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors(vars(value))


def _class_name(unit: FSDPModule) -> str:
    """The class that the module had before ``fully_shard`` swapped it."""
    return next(base.__name__ for base in type(unit).__mro__ if not issubclass(base, FSDPModule))


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', ...' if len(ranks) > 8 else ''} each"
