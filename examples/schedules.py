"""Two schedules of a pipeline that the package does not have, registered as yours would be: DualPipeV, and a search.

Importing this file is enough: ParallelMuonStrategy(pipeline_size=4, pipeline_schedule="dual_pipe_v",
pipeline_stages_per_rank=2) then trains with it.

python examples/schedules.py                                 # time and memory of all schedules, simulated
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, product

from lightning_muon import register_schedule
from lightning_muon.schedule.pipeline import (
    SCHEDULES,
    F,
    I,
    Node,
    Order,
    Pipeline,
    PipelineKind,
    StageCosts,
    W,
    make_order,
    peak_activations,
    phases,
    stage_ranks,
)
from lightning_muon.schedule.pipeline.play import Run, deepest_first, needs, play_order


@register_schedule("dual_pipe_v")
def dual_pipe_v(pipeline: Pipeline) -> Order:
    """Stages run to the last rank and back; in the steady phase each forward is next to a backward of the other stage.

    A runtime may run such a pair as one, so that messages of one hide behind arithmetic of the other; here they run one
    after the other. With f, i, w seconds of the forward and the two parts of the backward of each of 2p stages: idle
    time (p-1)(f+i-w) if w <= i <= f, and 2p+1 activations of a micro-batch in a stage.

    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1; the V form: github.com/deepseek-ai/DualPipe.
    """
    p, m = pipeline.num_ranks, pipeline.num_microbatches
    if pipeline.stages_per_rank != 2 or m < 2 * p:
        raise ValueError(
            f"dual_pipe_v needs exactly 2 stages per rank and at least {2 * p} micro-batches on {p} ranks, got "
            f"stages_per_rank={pipeline.stages_per_rank} and num_microbatches={m}"
        )
    order: Order = []
    for rank in range(p):
        # The last backwards take turns between the stages; the second half of them is split.
        turns = ["B1", "B0"] * (rank + 1)
        split = [turn.replace("B", "I") for turn in turns[rank + 1 :]]
        order.append(
            phases(
                pipeline.v_stages(rank),
                (2 * (p - 1 - rank), "F0"),
                (rank + 1, "F0 F1"),
                (p - 1 - rank, "I1 W F1"),
                (m - 2 * p + rank + 1, "F0 B1 F1 B0"),
                (p - 1 - rank, "B1 F1 B0"),
                (1, " ".join(turns[: rank + 1] + split)),
                (p - 1 - rank, "W I0"),
                (rank + 1, "W"),
            )
        )
    return order


# Limit of nodes that are simulated to improve an order: one or two seconds of a core.
NODES_TO_TRY = 100_000
MOST_TRIALS = 200


@register_schedule("auto")
def auto(pipeline: Pipeline) -> Order:
    """For measured costs: the fastest order found within the memory limit, never slower than a schedule by name.

    All registered schedules that take these sizes are timed, and some list schedules; then neighbours on the critical
    path of the best one are swapped as long as that makes it faster. Every rank finds the same order: nothing depends
    on a clock or on chance.
    """
    best = min(candidates(pipeline), key=lambda timed: timed.key)
    return improved(best, pipeline).order


@dataclass(frozen=True)
class Timed:
    order: Order
    run: Run

    @property
    def key(self) -> tuple[float, int]:
        """Sort key, better ones first: less time, then less memory."""
        return self.run.makespan, max(map(peak_activations, self.order))


def candidates(pipeline: Pipeline) -> Iterator[Timed]:
    for name in SCHEDULES:
        if name != "auto":
            with suppress(ValueError):  # Not for these sizes, or this limit.
                order = make_order(name, pipeline)
                yield Timed(order, play_order(order, pipeline, stage_ranks(order)))
    num_ranks = range(pipeline.num_ranks)
    places = [{stage: rank for rank in num_ranks for stage in pipeline.loop_stages(rank)}]
    if pipeline.stages_per_rank == 2:
        places.append({stage: rank for rank in num_ranks for stage in pipeline.v_stages(rank)})
    # The memory of 1F1B, and twice that, beyond which more does not help; both within the limit.
    limits = {min(pipeline.memory_limit, factor * pipeline.num_stages) for factor in (1, 2)}
    for rank_of, limit, patience, is_eager in product(places, sorted(limits), (0.0, 1.0), (False, True)):
        run = list_schedule(pipeline, rank_of, limit, patience=patience, is_eager=is_eager)
        yield Timed(run.order, run)


def list_schedule(
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


def improved(timed: Timed, pipeline: Pipeline) -> Timed:
    """Swap neighbours on the critical path as long as that helps.

    This is the neighbourhood of job-shop scheduling: no other swap of neighbours can make the schedule shorter.

    Source: van Laarhoven, Aarts and Lenstra 1992, Operations Research 40(1), section 3.
    """
    rank_of = stage_ranks(timed.order)
    trials_left = min(MOST_TRIALS, NODES_TO_TRY // max(1, len(timed.run.end)))
    tried: set[tuple[Node, Node]] = set()
    while trials_left:
        pairs = [pair for pair in critical_pairs(timed) if pair not in tried]
        if not pairs:
            break
        trials_left -= 1
        tried.add(pairs[0])
        order = swapped(timed.order, rank_of[pairs[0][0].stage], pairs[0])
        if max(map(peak_activations, order)) > pipeline.memory_limit:
            continue
        try:
            changed = Timed(order, play_order(order, pipeline, rank_of))
        except ValueError:  # Ranks would wait for each other.
            continue
        if changed.run.makespan < timed.run.makespan:
            timed = changed
            tried.clear()
    return timed


def critical_pairs(timed: Timed) -> list[tuple[Node, Node]]:
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


def swapped(order: Sequence[Sequence[Node]], rank: int, pair: tuple[Node, Node]) -> Order:
    nodes = list(order[rank])
    index = nodes.index(pair[0])
    nodes[index : index + 2] = reversed(pair)
    return [nodes if each == rank else list(others) for each, others in enumerate(order)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--communication", type=float, default=0.1, help="of a message; forward, I and W take 1 / stages"
    )
    arguments = parser.parse_args()
    print("schedule          stages  seconds  micro-batches held")
    for name in SCHEDULES:
        for stages in (1, 2):
            costs = StageCosts(**dict.fromkeys(("forward", "backward_input", "backward_weight"), 1 / stages))
            pipeline = Pipeline(
                num_ranks=arguments.ranks,
                num_microbatches=arguments.microbatches,
                stages_per_rank=stages,
                costs=replace(costs, communication=arguments.communication),
            )
            with suppress(ValueError):  # A schedule may take one of both only.
                order = make_order(name, pipeline)
                seconds = play_order(order, pipeline, stage_ranks(order)).makespan
                held = max(map(peak_activations, order)) / stages
                print(f"{name:17} {stages:6} {seconds:8.2f} {held:19.1f}")


if __name__ == "__main__":
    main()
