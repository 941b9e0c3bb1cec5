"""Checks of pipeline schedules before any rank runs them; errors name the node."""

from __future__ import annotations

from lightning_muon.schedule.pipeline.nodes import COMPUTE_KINDS, B, F, I, Node, Order, W, peak_activations, stage_ranks
from lightning_muon.schedule.pipeline.play import play_order
from lightning_muon.schedule.pipeline.problem import Pipeline


def check_order(order: Order, pipeline: Pipeline) -> None:
    """Check that an order runs each micro-batch once in each stage, and stays within the memory limit.

    Each has ``F`` and either ``B`` or ``I`` and ``W``, in this order and all on one rank. A ``ValueError`` says what is
    missing, twice, too early or too large.
    """
    if len(order) != pipeline.num_ranks:
        raise ValueError(f"{len(order)} ranks are listed, the pipeline has num_ranks={pipeline.num_ranks}")
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
