"""The schedule "auto", for measured costs and a memory limit: the best of known and list schedules, then improved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, product

from lightning_muon.schedule.pipeline.nodes import F, I, Node, Order, PipelineKind, W, peak_activations, placement
from lightning_muon.schedule.pipeline.play import Run, deepest_first, needs, play_order
from lightning_muon.schedule.pipeline.problem import Pipeline
from lightning_muon.schedule.pipeline.registry import SCHEDULES, make_order, register_schedule

# Limit of nodes that are simulated to improve an order: one or two seconds of a core.
_NODES_TO_TRY = 100_000
_MOST_TRIALS = 200


@register_schedule("auto")
def auto(pipeline: Pipeline) -> Order:
    """The fastest order found within the memory limit, never slower than a registered schedule within it.

    All registered schedules that take these sizes are timed, and some list schedules; then neighbours on the critical
    path of the best one are swapped as long as that makes it faster. Every rank finds the same order: nothing depends
    on a clock or on chance.
    """
    best = min(_candidates(pipeline), key=lambda timed: timed.key)
    return _improved(best, pipeline).order


@dataclass(frozen=True)
class _Timed:
    order: Order
    run: Run

    @property
    def key(self) -> tuple[float, int]:
        """Sort key, better ones first: less time, then less memory."""
        return self.run.makespan, max(map(peak_activations, self.order))


def _candidates(pipeline: Pipeline) -> Iterator[_Timed]:
    for name in SCHEDULES:
        if name != "auto":
            with suppress(ValueError):  # Not for these sizes, or this limit.
                order = make_order(name, pipeline)
                yield _Timed(order, play_order(order, pipeline, placement(order)))
    num_ranks = range(pipeline.num_ranks)
    places = [{stage: rank for rank in num_ranks for stage in pipeline.loop_stages(rank)}]
    if pipeline.stages_per_rank == 2:
        places.append({stage: rank for rank in num_ranks for stage in pipeline.v_stages(rank)})
    # The memory of 1F1B, and twice that, beyond which more does not help; both within the limit.
    limits = {min(pipeline.memory_limit, factor * pipeline.num_stages) for factor in (1, 2)}
    for rank_of, limit, patience, is_eager in product(places, sorted(limits), (0.0, 1.0), (False, True)):
        run = _list_schedule(pipeline, rank_of, limit, patience=patience, is_eager=is_eager)
        yield _Timed(run.order, run)


def _list_schedule(
    pipeline: Pipeline, rank_of: Mapping[int, int], limit: float, *, patience: float, is_eager: bool
) -> Run:
    """List schedule: a free rank runs a ready ``I``, else ``F`` within the limit, else ``W``; deepest stage first.

    It waits for an ``I`` instead if that comes within ``patience`` times the seconds of the node it could run. With
    ``is_eager`` it runs an ``F`` before an ``I``.
    """
    microbatches = range(pipeline.num_microbatches)
    stages = deepest_first(rank_of, pipeline.num_ranks)
    forwards = {stage: deque(F(stage, each) for each in microbatches) for stage in rank_of}
    inputs = {stage: deque(I(stage, each) for each in microbatches) for stage in rank_of}
    weights: list[deque[Node]] = [deque() for _ in stages]

    def choose(run: Run, rank: int) -> Node | None:
        # A micro-batch that has begun must fit into memory in all later stages of the rank, or there is a deadlock.
        admitted = [
            forwards[stage]
            for number_behind, stage in enumerate(stages[rank])
            if forwards[stage] and run.alive[rank] + 1 + number_behind <= limit
        ]
        backwards = [inputs[stage] for stage in stages[rank] if inputs[stage]]
        groups = [admitted, backwards] if is_eager else [backwards, admitted]
        ready = (nodes for group in groups for nodes in group if run.is_ready(nodes[0]))
        nodes = next(ready, weights[rank])
        if not nodes:
            return None
        wait = min((run.expected(each[0]) - run.now for each in backwards), default=0.0)
        if 0 < wait < patience * run.seconds(nodes[0]):
            return None
        node = nodes.popleft()
        if node.kind == PipelineKind.BACKWARD_INPUT:
            weights[rank].append(W(node.stage, node.microbatch))
        return node

    return Run(pipeline, rank_of).play(choose)


def _improved(timed: _Timed, pipeline: Pipeline) -> _Timed:
    """Swap neighbours on the critical path as long as that helps.

    This is the neighbourhood of job-shop scheduling: no other swap of neighbours can make the schedule shorter.

    Source: van Laarhoven, Aarts and Lenstra 1992, Operations Research 40(1), section 3.
    """
    rank_of = placement(timed.order)
    trials_left = min(_MOST_TRIALS, _NODES_TO_TRY // max(1, len(timed.run.end)))
    tried: set[tuple[Node, Node]] = set()
    while trials_left:
        pairs = [pair for pair in _critical_pairs(timed) if pair not in tried]
        if not pairs:
            break
        trials_left -= 1
        tried.add(pairs[0])
        order = _swapped(timed.order, rank_of[pairs[0][0].stage], pairs[0])
        if max(map(peak_activations, order)) > pipeline.memory_limit:
            continue
        try:
            changed = _Timed(order, play_order(order, pipeline, rank_of))
        except ValueError:  # Ranks would wait for each other.
            continue
        if changed.run.makespan < timed.run.makespan:
            timed = changed
            tried.clear()
    return timed


def _critical_pairs(timed: _Timed) -> list[tuple[Node, Node]]:
    """Neighbours of one rank on the critical path, which can be swapped: the second does not need the first."""
    start, end = timed.run.start, timed.run.end
    before = {later: node for nodes in timed.order for node, later in pairwise(nodes)}
    node: Node | None = max(end, key=lambda node: end[node])
    pairs: list[tuple[Node, Node]] = []
    while node is not None:
        earlier = before.get(node)
        if earlier is not None and end[earlier] == start[node]:
            if earlier not in needs(node, end):
                pairs.append((earlier, node))
            node = earlier
        else:
            node = max(needs(node, end), key=lambda need: end[need], default=None)
    return pairs


def _swapped(order: Sequence[Sequence[Node]], rank: int, pair: tuple[Node, Node]) -> Order:
    nodes = list(order[rank])
    index = nodes.index(pair[0])
    nodes[index : index + 2] = reversed(pair)
    return [nodes if each == rank else list(others) for each, others in enumerate(order)]
