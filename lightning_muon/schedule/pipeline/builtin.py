"""Schedules by name: those from papers, each with its bubble and its memory, and those that users add.

In the formulas: p ranks, v stages per rank, m micro-batches; f, i, w seconds of the forward and of the two parts of the
backward of one stage, equal for all stages, and messages that take no time. The *idle time* is that of the rank with
the longest time from its first node to the end of its last one, the *bubble* is its share of that time, and
``B = (p-1)/(m+p-1)``. The *memory* is the largest number of activations that a rank holds, over ``p v``: 1 is what 1F1B
needs. Tests assert all of them with the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations, product

from lightning_muon.config import nearest
from lightning_muon.removed import removed
from lightning_muon.schedule.pipeline.nodes import (
    B,
    F,
    I,
    Node,
    Order,
    Pipeline,
    PipelineKind,
    W,
    peak_activations,
    stage_ranks,
)
from lightning_muon.schedule.pipeline.play import Run, check_order, deepest_first, fill_weights

Schedule = Callable[[Pipeline], Order]
"""Lists what each rank of a pipeline does: ``F`` and either ``B`` or ``I`` and ``W`` of each stage and micro-batch."""

SCHEDULES: dict[str, Schedule] = {}
"""All schedules by name."""


def register_schedule(name: str) -> Callable[[Schedule], Schedule]:
    """Register a schedule by name; use it as a decorator.

    Example:
        >>> @register_schedule("one_at_a_time")
        ... def one_at_a_time(pipeline):
        ...     micro_batches = range(pipeline.num_microbatches)
        ...     return [[node for each in micro_batches for node in (F(rank, each), B(rank, each))]
        ...             for rank in range(pipeline.num_ranks)]
    """

    def register(schedule: Schedule) -> Schedule:
        if SCHEDULES.setdefault(name, schedule) is not schedule:
            raise ValueError(f"there is a schedule {name!r} already; choose another name")
        return schedule

    return register


def find_schedule(name: str) -> Schedule:
    """The schedule of this name; a ``ValueError`` names the one that was probably meant."""
    if name not in SCHEDULES:
        if (gone := removed(f"pipeline_schedule={name!r}")) is not None:
            raise ValueError(gone)
        hint = nearest(name, list(SCHEDULES))
        meant = f"did you mean {hint!r}?" if hint else f"there are {', '.join(SCHEDULES)}"
        raise ValueError(f"there is no schedule {name!r}; {meant}")
    return SCHEDULES[name]


def make_order(name: str, pipeline: Pipeline) -> Order:
    """The schedule of this name for a pipeline, checked for completeness, deadlock and its memory limit."""
    schedule = find_schedule(name)
    try:
        order = schedule(pipeline) or []
        check_order(order, pipeline)
    except ValueError as error:
        raise ValueError(f"schedule {name!r}: {error}") from error
    return order


@register_schedule("gpipe")
def gpipe(pipeline: Pipeline) -> Order:
    """All forwards, then all backwards.

    Idle time: (p-1)(f+i+w), bubble B. Memory: m/p.

    Source: Huang et al. 2019, arXiv:1811.06965.
    """
    _need(pipeline, "gpipe", 1, "interleaved_1f1b")
    return _alternating(pipeline, B, warmups=[pipeline.num_microbatches] * pipeline.num_ranks)


@register_schedule("1f1b")
def one_forward_one_backward(pipeline: Pipeline) -> Order:
    """Forwards until the first gradient has arrived, then a backward after each forward.

    Idle time: (p-1)(f+i+w), bubble B. Memory: 1.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1.
    """
    _need(pipeline, "1f1b", 1, "interleaved_1f1b", microbatches=pipeline.num_ranks)
    return _alternating(pipeline, B, warmups=range(pipeline.num_ranks)[::-1])


@register_schedule("interleaved_1f1b")
def interleaved_1f1b(pipeline: Pipeline) -> Order:
    """1F1B with several stages per rank: a round of p micro-batches in its first stage, then the same in its second.

    Idle time: (p-1)(f+i+w), which is 1/v of that of 1F1B; bubble (p-1)/(v m+p-1). Memory: 1+(p-1)/(v p). Both if p
    divides m; otherwise rounds have more micro-batches, which takes more memory.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2.
    """
    round_size = _round_size(pipeline, "interleaved_1f1b")
    first = (pipeline.stages_per_rank - 1) * round_size
    warmups = [first + 2 * distance for distance in range(pipeline.num_ranks)[::-1]]
    return _alternating(pipeline, B, warmups=warmups, round_size=round_size)


@register_schedule("zb_h1")
def zb_h1(pipeline: Pipeline) -> Order:
    """1F1B with split backwards; rank r runs ``W`` of a micro-batch after ``I`` of the r-th one behind it.

    Idle time: (p-1)(f+i-w) if w <= f and w <= i; bubble B/3 if f = i = w and m is large. Memory: 1.

    Source: Qi et al. 2023, arXiv:2401.10241, section 2.1.
    """
    _need(pipeline, "zb_h1", 1, "zb_1p", microbatches=pipeline.num_ranks)
    order = _alternating(pipeline, I, warmups=range(pipeline.num_ranks)[::-1])
    return [_delay_weights(nodes, rank) for rank, nodes in enumerate(order)]


@register_schedule("zb_1p")
def zb_1p(pipeline: Pipeline) -> Order:
    """1F1B, or interleaved 1F1B, with split backwards; ``W`` fill the bubbles of the given costs, in the same memory.

    Idle time: as ZB-H1, with f, i, w of one stage; bubble B/(3v) if f = i = w and m is large. Memory: 1.

    Source: Qi et al. 2023, arXiv:2401.10241, section 3.
    """
    if pipeline.stages_per_rank == 1:
        _need(pipeline, "zb_1p", 1, "zb_v", microbatches=pipeline.num_ranks)
        round_size = pipeline.num_microbatches
    else:
        round_size = _round_size(pipeline, "zb_1p")
    first = (pipeline.stages_per_rank - 1) * round_size
    warmups = [first + distance for distance in range(pipeline.num_ranks)[::-1]]
    order = _alternating(pipeline, I, warmups=warmups, round_size=round_size)
    return fill_weights(order, pipeline, stage_ranks(order), first + pipeline.num_ranks)


@register_schedule("zb_2p")
def zb_2p(pipeline: Pipeline) -> Order:
    """ZB-1P with twice the warm-up, so that no rank waits for its first gradient.

    Idle time: 0 if f = i = w and m >= 2p-1. The last rank begins and ends (p-1) f after the first one, so a step that
    must wait for all ranks is as long as with ZB-1P. Memory: (2p-1)/p; 2 if p is large.

    Source: Qi et al. 2023, arXiv:2401.10241, sections 2.2 and 3.
    """
    _need(pipeline, "zb_2p", 1, "zb_v, which has no bubble either,", microbatches=pipeline.num_ranks)
    order = _alternating(pipeline, I, warmups=[2 * distance for distance in range(pipeline.num_ranks)[::-1]])
    return fill_weights(order, pipeline, stage_ranks(order), 2 * pipeline.num_ranks - 1)


@register_schedule("zb_v")
def zb_v(pipeline: Pipeline) -> Order:
    """Stages run from the first rank to the last and back, so that rank 0 has the loss; ``W`` fill the bubbles.

    Idle time: 0 if f = i = w and m >= 2p-1. Memory: 1.

    Source: Qi et al. 2023, arXiv:2401.10241, section 6.
    """
    _need(pipeline, "zb_v", 2, "zb_1p")
    p, m = pipeline.num_ranks, pipeline.num_microbatches
    order: Order = []
    for rank in range(p):
        # With too few micro-batches to fill the pipeline, take the order for more, and leave out the others.
        later = max(m, 2 * p - 1) - p
        nodes = phases(
            pipeline.v_stages(rank),
            (2 * (p - rank) - 1, "F0"),
            (rank, "F1 F0"),
            (p - rank, "F1 I1"),
            (later - (p - 1 - rank), "F0 I0 F1 I1"),
            (p - 1 - rank, "I0 F1 I1"),
            (rank, "I0 I1"),
            (p - rank, "I0"),
        )
        order.append([node for node in nodes if node.microbatch < m])
    return fill_weights(order, pipeline, stage_ranks(order), 2 * p)


@register_schedule("v_half")
def v_half(pipeline: Pipeline) -> Order:
    """ZB-V in half the memory, since a micro-batch comes back sooner.

    Idle time if f = i = w and m >= 2p: 3(p-1) f, or (3p-4) f if p is odd; bubble B/2 if m is large. Memory: (p+2)/(2p),
    or (p+1)/(2p) if p is odd; 1/2 if p is large.

    Source: Qi et al. 2024, arXiv:2405.15362, section 4.
    """
    _need(pipeline, "v_half", 2, "zb_1p")
    return _from_building_block(pipeline, (1, 2, 1, 2))


@register_schedule("v_min")
def v_min(pipeline: Pipeline) -> Order:
    """ZB-V in a third of the memory, since a micro-batch comes back as soon as it can.

    Idle time if f = i = w and m >= 2p: (4p-5) f, or (4p-3) f if 3 divides p; bubble 2B/3 if m is large. Memory:
    ceil((p+2)/3)/p; 1/3 if p is large.

    Source: Qi et al. 2024, arXiv:2405.15362, section 4.
    """
    _need(pipeline, "v_min", 2, "zb_1p")
    return _from_building_block(pipeline, (1, 1, 1, 1))


def forward_only(pipeline: Pipeline, rank_of: Mapping[int, int]) -> Order:
    """Forwards only, for evaluation: each rank runs the deepest stage that is ready; for any number of micro-batches.

    ``rank_of``: stage -> rank, as :func:`~.nodes.stage_ranks` gives it for a schedule of training.
    """
    todo = {stage: deque(F(stage, each) for each in range(pipeline.num_microbatches)) for stage in rank_of}
    stages = deepest_first(rank_of, pipeline.num_ranks)

    def choose(run: Run, rank: int) -> Node | None:
        ready = (todo[stage].popleft() for stage in stages[rank] if todo[stage] and run.is_ready(todo[stage][0]))
        return next(ready, None)

    return Run(pipeline, rank_of).play(choose).order


def _need(pipeline: Pipeline, name: str, stages: int, instead: str, *, microbatches: int = 1) -> None:
    """Raise ``ValueError`` for other stages per rank, or fewer micro-batches."""
    if pipeline.stages_per_rank != stages:
        raise ValueError(
            f"{name} needs exactly {stages} stages per rank, got stages_per_rank={pipeline.stages_per_rank}; "
            f"set it to {stages}, or take {instead} instead"
        )
    if pipeline.num_microbatches < microbatches:
        raise ValueError(
            f"{name} needs at least {microbatches} micro-batches on {pipeline.num_ranks} ranks, got num_microbatches="
            f"{pipeline.num_microbatches}; split the batch into more, or take fewer ranks"
        )


def _round_size(pipeline: Pipeline, name: str) -> int:
    """Number of micro-batches of a round: p, or a few more, so that all rounds are equal."""
    num_ranks, number = pipeline.num_ranks, pipeline.num_microbatches
    num_rounds = max(1, number // num_ranks)
    if number % num_rounds:
        raise ValueError(
            f"{name} needs num_microbatches to be divisible by max(1, num_microbatches // num_ranks) = {num_rounds}, "
            f"got num_microbatches={number} on num_ranks={num_ranks}; take {number // num_ranks * num_ranks}"
        )
    return number // num_rounds


def _alternating(
    pipeline: Pipeline, backward: Callable[[int, int], Node], *, warmups: Sequence[int], round_size: int = 0
) -> Order:
    """Each rank runs its ``warmups`` forwards, then a backward after each forward, then the other backwards.

    A round of micro-batches goes through one stage of the rank after the other. Rounds are equal; 0 means one round.
    """
    size = round_size or pipeline.num_microbatches
    rounds = [range(start, start + size) for start in range(0, pipeline.num_microbatches, size)]
    order: Order = []
    for rank, warmup in enumerate(warmups):
        stages = pipeline.loop_stages(rank)
        forwards = [F(stage, each) for part in rounds for stage in stages for each in part]
        backwards = [backward(stage, each) for part in rounds for stage in reversed(stages) for each in part]
        nodes = forwards[:warmup]
        for pair in zip(forwards[warmup:], backwards, strict=False):
            nodes += pair
        order.append(nodes + backwards[len(forwards[warmup:]) :])
    return order


def _delay_weights(nodes: Sequence[Node], delay: int) -> list[Node]:
    """Add each ``W`` after the ``I`` that comes ``delay`` micro-batches later; the last ones at the end."""
    weights: deque[Node] = deque()
    delayed: list[Node] = []
    for node in nodes:
        delayed.append(node)
        if node.kind == PipelineKind.BACKWARD_INPUT:
            weights.append(W(node.stage, node.microbatch))
            if len(weights) > delay:
                delayed.append(weights.popleft())
    return [*delayed, *weights]


def phases(stages: Sequence[int], *repeated: tuple[int, str]) -> list[Node]:
    """Nodes of a rank with these stages, phase by phase.

    ``(3, "F0 B1")`` is three times a forward of its first stage and a backward of its second one, each of the next
    micro-batch. A ``W`` without a number belongs to the oldest ``I`` that has none.
    """
    counts = {(chunk, kind): 0 for chunk in range(len(stages)) for kind in "FB"}
    weights: deque[Node] = deque()
    nodes: list[Node] = []
    for number, names in repeated:
        for name in names.split() * number:
            if name == PipelineKind.BACKWARD_WEIGHT:
                nodes.append(weights.popleft())
                continue
            kind, chunk = name[0], int(name[1])
            counter = chunk, "F" if kind == PipelineKind.FORWARD else "B"
            nodes.append(Node(stages[chunk], kind, counts[counter]))
            counts[counter] += 1
            if kind == PipelineKind.BACKWARD_INPUT:
                weights.append(W(stages[chunk], nodes[-1].microbatch))
    return nodes


_PERIOD = 6  # Number of slots of a rank for one micro-batch: F, I, W of two stages.


def _from_building_block(pipeline: Pipeline, gaps: tuple[int, int, int, int]) -> Order:
    """Repeat the passes of one micro-batch every six slots; then close the gaps, and fill bubbles with ``W``.

    ``gaps``: slots between two neighbouring ranks, in forward through their first and second stages, and in backward
    through their second and first ones. A micro-batch is alive through all of them, so their sum fixes the memory.
    """
    order: Order = []
    limit = 0
    for block in _building_block(pipeline, gaps):
        slots = [
            (slot + _PERIOD * each, node._replace(microbatch=each))
            for slot, node in block
            for each in range(pipeline.num_microbatches)
        ]
        nodes = [node for _, node in sorted(slots)]
        limit = max(limit, peak_activations(nodes))
        order.append([node for node in nodes if node.kind != PipelineKind.BACKWARD_WEIGHT])
    return fill_weights(order, pipeline, stage_ranks(order), limit)


def _building_block(pipeline: Pipeline, gaps: tuple[int, int, int, int]) -> list[list[tuple[int, Node]]]:
    """The slots of micro-batch 0 for each rank, such that no two passes of a rank coincide when they are repeated.

    Passes turn round at the last rank, the first, and the last again, each time delayed by as many slots as needed so
    that they do not coincide; of all ways, the one with the lowest peak of activations is chosen.
    """
    p = pipeline.num_ranks
    found: dict[int, list[list[tuple[int, Node]]]] = {}
    for extra in sorted(product(range(_PERIOD), repeat=3), key=sum):
        # Slots in which the passes begin on the rank where they turn round.
        second = 1 + (p - 1) * gaps[0] + extra[0]
        input_second = second + 1 + (p - 1) * gaps[1] + extra[1]
        input_first = input_second + 1 + (p - 1) * gaps[2] + extra[2]
        passes = [
            (
                rank * gaps[0],
                second + (p - 1 - rank) * gaps[1],
                input_second + rank * gaps[2],
                input_first + (p - 1 - rank) * gaps[3],
            )
            for rank in range(p)
        ]
        if all(len({slot % _PERIOD for slot in slots}) == len(slots) for slots in passes):
            block = [_with_weights(slots, pipeline.v_stages(rank)) for rank, slots in enumerate(passes)]
            found.setdefault(max(map(_steady_peak, block)), block)
    return found[min(found)]


def _steady_peak(block: Sequence[tuple[int, Node]]) -> int:
    """Most activations that a rank holds if it repeats the block forever."""

    def begun(kind: str, until: int) -> int:
        """Number of nodes of this kind that have begun, up to a constant that is the same for all kinds."""
        return sum((until - slot) // _PERIOD for slot, node in block if node.kind == kind)

    # An activation is free in the slot after its W.
    return max(
        begun(PipelineKind.FORWARD, now) - begun(PipelineKind.BACKWARD_WEIGHT, now - 1) for now in range(_PERIOD)
    )


def _with_weights(slots: tuple[int, int, int, int], stages: tuple[int, int]) -> list[tuple[int, Node]]:
    """The passes of micro-batch 0, with ``W`` in the two free slots, as soon after ``I`` as possible."""
    first, second = stages
    nodes = [F(first, 0), F(second, 0), I(second, 0), I(first, 0)]
    left = [slot for slot in range(_PERIOD) if slot not in {each % _PERIOD for each in slots}]

    def next_slot(after: int, residue: int) -> int:
        return after + 1 + (residue - after - 1) % _PERIOD

    weights = min(
        ((next_slot(slots[2], one), next_slot(slots[3], other)) for one, other in permutations(left)), key=sum
    )
    return list(zip((*slots, *weights), (*nodes, W(second, 0), W(first, 0)), strict=True))
