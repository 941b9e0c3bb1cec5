"""Simulates a pipeline decision by decision: which node a free rank runs next.

Schedules are checked by it before any rank runs; errors name the node.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from heapq import heappop, heappush

from lightning_muon.schedule.pipeline.nodes import (
    COMPUTE_KINDS,
    WEIGHT_KINDS,
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
from lightning_muon.schedule.program import NAMED


class Run:
    """A simulated run: the nodes that have begun and ended until ``now``."""

    def __init__(self, pipeline: Pipeline, rank_of: Mapping[int, int]) -> None:
        self.pipeline = pipeline
        self.now = 0.0
        self.alive = [0] * pipeline.num_ranks  # Activations that each rank holds.
        # (whether it is an end, node), in order of time; messages are sent at ends, in this order.
        self.log: list[tuple[bool, Node]] = []
        self.start: dict[Node, float] = {}
        self.end: dict[Node, float] = {}
        # Node -> time at which all it needs is on its rank. Keys: forwards, `I` for both kinds of backward, and `W`.
        self.arrived: dict[Node, float] = {F(0, each): 0.0 for each in range(pipeline.num_microbatches)}
        self._expected: dict[Node, float] = {}
        self._enabled: dict[Node, list[Node]] = {}  # Running node -> nodes that need its result.
        self._rank_of = rank_of
        self._is_busy = [False] * pipeline.num_ranks
        self._link_free: dict[tuple[int, int], float] = {}
        self._events: list[tuple[float, int, int, Node | None]] = []
        self._num_events = 0

    @property
    def makespan(self) -> float:
        """Seconds until the last node has ended."""
        return max(self.end.values(), default=0.0)

    @property
    def order(self) -> Order:
        """The nodes that each rank has begun."""
        order: Order = [[] for _ in self.alive]
        for is_end, node in self.log:
            if not is_end:
                order[self._rank_of[node.stage]].append(node)
        return order

    def seconds(self, node: Node) -> float:
        """Seconds that the node takes."""
        return self.pipeline.costs.of(node.kind)

    def is_ready(self, node: Node) -> bool:
        """Whether all that the node needs is on its rank."""
        return self.arrived.get(_need(node), math.inf) <= self.now

    def expected(self, node: Node) -> float:
        """Time at which all it needs will be there, if the link is free; infinite if that is not being computed."""
        need = _need(node)
        return self.arrived.get(need, self._expected.get(need, math.inf))

    def play(self, choose: Choose) -> Run:
        """Let each free rank run the node that ``choose`` returns, until no rank runs one."""
        for rank in range(len(self.alive)):
            self._add_event(0.0, rank, None)
        while self._events:
            self.now = self._events[0][0]
            touched: set[int] = set()
            while self._events and self._events[0][0] == self.now:
                _, _, rank, ended = heappop(self._events)
                touched.add(rank)
                if ended is not None:
                    self._is_busy[rank] = False
                    self._finish(ended, rank)
            for rank in sorted(touched):
                node = None if self._is_busy[rank] else choose(self, rank)
                if node is not None:
                    self._begin(node, rank)
        return self

    def _add_event(self, time: float, rank: int, ended: Node | None) -> None:
        heappush(self._events, (time, self._num_events, rank, ended))
        self._num_events += 1

    def _begin(self, node: Node, rank: int) -> None:
        end = self.now + self.seconds(node)
        self.start[node], self.end[node] = self.now, end
        self.log.append((False, node))
        self.alive[rank] += (node.kind == PipelineKind.FORWARD) - (node.kind in WEIGHT_KINDS)
        self._is_busy[rank] = True
        self._add_event(end, rank, node)
        for later in self._enabled.setdefault(node, self._find_enabled(node)):
            travels = self._rank_of[later.stage] != rank
            self._expected[later] = end + travels * self.pipeline.costs.communication

    def _finish(self, node: Node, rank: int) -> None:
        self.log.append((True, node))
        for later in self._enabled.pop(node):
            self.arrived[later] = self.now
            other = self._rank_of[later.stage]
            if other != rank:
                link = (min(rank, other), max(rank, other))
                begin = max(self.now, self._link_free.get(link, 0.0))
                self.arrived[later] = self._link_free[link] = begin + self.pipeline.costs.communication
                self._add_event(self.arrived[later], other, None)

    def _find_enabled(self, node: Node) -> list[Node]:
        """The nodes that need the result of the node."""
        stage, kind, microbatch = node
        if kind == PipelineKind.FORWARD:
            is_last = stage == self.pipeline.num_stages - 1
            return [I(stage, microbatch) if is_last else F(stage + 1, microbatch)]
        weight = [W(stage, microbatch)] if kind == PipelineKind.BACKWARD_INPUT else []
        return weight + ([I(stage - 1, microbatch)] if stage and kind != PipelineKind.BACKWARD_WEIGHT else [])


def needs(node: Node, known: Container[Node]) -> list[Node]:
    """The ``known`` nodes whose results a node needs."""
    stage, kind, microbatch = node
    if kind == PipelineKind.FORWARD:
        found = [F(stage - 1, microbatch)]
    elif kind == PipelineKind.BACKWARD_WEIGHT:
        found = [F(stage, microbatch), I(stage, microbatch)]
    else:
        found = [F(stage, microbatch), B(stage + 1, microbatch), I(stage + 1, microbatch)]
    return [each for each in found if each in known]


Choose = Callable[[Run, int], Node | None]
"""Returns the ready node that a free rank runs next; ``None`` waits until something arrives."""


def _need(node: Node) -> Node:
    return I(node.stage, node.microbatch) if node.kind == PipelineKind.BACKWARD else node


def play_order(order: Order, pipeline: Pipeline, rank_of: Mapping[int, int]) -> Run:
    """Simulate when each node of an order begins and ends; a ``ValueError`` names those that can never begin."""
    position = [0] * len(order)

    def choose(run: Run, rank: int) -> Node | None:
        nodes = order[rank]
        if position[rank] < len(nodes) and run.is_ready(nodes[position[rank]]):
            position[rank] += 1
            return nodes[position[rank] - 1]
        return None

    run = Run(pipeline, rank_of).play(choose)
    stuck = [f"{nodes[at]} of rank {rank}" for rank, nodes in enumerate(order) if (at := position[rank]) < len(nodes)]
    if stuck:
        raise ValueError(f"deadlock: {', '.join(stuck[:NAMED])} wait for what can never begin; list it earlier")
    return run


def fill_weights(order: Sequence[Sequence[Node]], pipeline: Pipeline, rank_of: Mapping[int, int], limit: int) -> Order:
    """Add ``W`` to an order of ``F`` and ``I`` where a rank would wait at least that long, or is at its memory limit.

    A rank holds at most ``limit`` activations, each from ``F`` to ``W``. When its next node can run is known once the
    other rank has begun the node that it waits for.
    """
    todo = [deque(nodes) for nodes in order]
    weights: list[deque[Node]] = [deque() for _ in order]

    def choose(run: Run, rank: int) -> Node | None:
        following, waiting = todo[rank], weights[rank]
        is_full = bool(following) and following[0].kind == PipelineKind.FORWARD and run.alive[rank] >= limit
        if following and not is_full and run.is_ready(following[0]):
            node = following.popleft()
            if node.kind == PipelineKind.BACKWARD_INPUT:
                waiting.append(W(node.stage, node.microbatch))
            return node
        if waiting and (is_full or not following or run.expected(following[0]) >= run.now + run.seconds(waiting[0])):
            return waiting.popleft()
        return None

    run = Run(pipeline, rank_of).play(choose)
    if any(todo):
        stuck = ", ".join(str(nodes[0]) for nodes in todo if nodes)
        raise ValueError(f"deadlock: {stuck} find no room among {limit} activations, or wait for what does not")
    return run.order


def deepest_first(rank_of: Mapping[int, int], num_ranks: int) -> list[list[int]]:
    """The stages of each rank, the last of the pipeline first."""
    stages = sorted(rank_of, reverse=True)
    return [[stage for stage in stages if rank_of[stage] == rank] for rank in range(num_ranks)]


def check_order(order: Order, pipeline: Pipeline) -> None:
    """Check that an order runs each micro-batch once in each stage, and stays within the memory limit.

    Each has ``F`` and either ``B`` or ``I`` and ``W``, in this order and all on one rank. A ``ValueError`` says what is
    missing, twice, too early or too large.
    """
    if len(order) != pipeline.num_ranks:
        few = f"{len(order)} ranks are listed, the pipeline has num_ranks={pipeline.num_ranks}"
        raise ValueError(f"{few}; return a list of nodes for each rank")
    rank_of = stage_ranks(order)
    place: dict[Node, int] = {}
    stages, microbatches = range(pipeline.num_stages), range(pipeline.num_microbatches)
    for rank, nodes in enumerate(order):
        for index, node in enumerate(nodes):
            if node.kind not in COMPUTE_KINDS or node.stage not in stages or node.microbatch not in microbatches:
                sizes = f"{len(stages)} stages and {len(microbatches)} micro-batches"
                raise ValueError(f"{node} on rank {rank} is not in a pipeline of {sizes}")
            if place.setdefault(node, index) != index:
                raise ValueError(f"{node} is on rank {rank} twice; it must run once")
    for stage in stages:
        for each in microbatches:
            _check_microbatch(place, stage, each)
    for rank, nodes in enumerate(order):
        held = peak_activations(nodes)
        if held > pipeline.memory_limit:
            raise ValueError(
                f"rank {rank} holds {held} activations, memory_limit={pipeline.memory_limit}; raise it, or take "
                "v_min or v_half, which need less"
            )
    play_order(order, pipeline, rank_of)


def _check_microbatch(place: dict[Node, int], stage: int, microbatch: int) -> None:
    forward, whole, parts = F(stage, microbatch), B(stage, microbatch), (I(stage, microbatch), W(stage, microbatch))
    num_parts = sum(node in place for node in parts)
    if forward not in place:
        raise ValueError(f"{forward} is missing; each micro-batch runs once in each stage")
    if (whole in place) + num_parts / 2 != 1:
        raise ValueError(
            f"micro-batch {microbatch} needs either {whole} or both {parts[0]} and {parts[1]}; there are "
            f"{[str(node) for node in (whole, *parts) if node in place]}"
        )
    places = [place[node] for node in (forward, whole, *parts) if node in place]
    if places != sorted(places):
        raise ValueError(
            f"stage {stage} runs the backward of micro-batch {microbatch} too early; it is F, then B or I and W"
        )
