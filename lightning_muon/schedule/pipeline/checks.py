"""Checks of pipeline schedules and programs before any rank runs them; errors name the node."""

from __future__ import annotations

from lightning_muon.schedule.pipeline.nodes import (
    COMPUTE_KINDS,
    WEIGHT_KINDS,
    B,
    F,
    I,
    Node,
    Order,
    PipelineKind,
    W,
    peak_activations,
    stage_ranks,
)
from lightning_muon.schedule.pipeline.play import play_order
from lightning_muon.schedule.pipeline.problem import Pipeline
from lightning_muon.schedule.program import Program, validate


def check_order(order: Order, pipeline: Pipeline, *, is_training: bool = True) -> None:
    """Check that an order runs each micro-batch once in each stage, and stays within the memory limit.

    Each has ``F`` and either ``B`` or ``I`` and ``W``, in this order and all on one rank; with ``is_training=False``
    only ``F``. A ``ValueError`` says what is missing, twice, too early or too large.
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
            _check_microbatch(place, stage, each, is_training=is_training)
    for rank, nodes in enumerate(order):
        held = peak_activations(nodes) if is_training else 0
        if held > pipeline.memory_limit:
            raise ValueError(
                f"rank {rank} holds {held} activations, memory_limit={pipeline.memory_limit}; raise it, or take "
                "v_min or v_half, which need less"
            )
    play_order(order, pipeline, rank_of)


def _check_microbatch(place: dict[Node, int], stage: int, microbatch: int, *, is_training: bool) -> None:
    forward, whole, parts = F(stage, microbatch), B(stage, microbatch), (I(stage, microbatch), W(stage, microbatch))
    num_parts = sum(node in place for node in parts)
    if forward not in place:
        raise ValueError(f"{forward} is missing; each micro-batch runs once in each stage")
    if (whole in place) + num_parts / 2 != is_training:
        raise ValueError(
            f"micro-batch {microbatch} needs either {whole} or both {parts[0]} and {parts[1]}; there are "
            f"{[str(node) for node in (whole, *parts) if node in place]}"
        )
    places = [place[node] for node in (forward, whole, *parts) if node in place]
    if places != sorted(places):
        raise ValueError(
            f"stage {stage} runs the backward of micro-batch {microbatch} too early; it is F, then B or I and W"
        )


def validate_pipeline(program: Program, pipeline: Pipeline, *, is_training: bool = True) -> None:
    """Check the finished program of a pipeline, as :func:`check_order` and :func:`~..validate.validate` do.

    All messages between two ranks are in one lane, so that both ranks must list them in the same order, in whichever
    direction they go: else these ranks wait for each other forever; the error names the messages. Gradients of a stage
    are reduced once, after its last backward.
    """
    listed = [
        [Node(op.items[0], op.kind, op.items[1]) for op in ops if op.kind in COMPUTE_KINDS] for ops in program.values()
    ]
    check_order(listed, pipeline, is_training=is_training)
    validate(program)
    is_reduced = any(op.kind == PipelineKind.REDUCE_GRAD for ops in program.values() for op in ops)
    for rank, ops in program.items():
        last = {op.items[0]: index for index, op in enumerate(ops) if op.kind in WEIGHT_KINDS}
        found = [(op.items[0], index) for index, op in enumerate(ops) if op.kind == PipelineKind.REDUCE_GRAD]
        for stage, index in found:
            if index < last.get(stage, index + 1):
                raise ValueError(f"{ops[index].name} of rank {rank} comes before stage {stage} has all gradients")
        if is_reduced and sorted(stage for stage, _ in found) != sorted(last):
            raise ValueError(
                f"rank {rank} has {PipelineKind.REDUCE_GRAD} of the stages {[stage for stage, _ in found]}; "
                f"it must have one of each of {sorted(last)}"
            )
