"""Random pipelines, and what is measured of an order."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_muon.schedule.pipeline import Order, Pipeline, StageCosts, build_program
from lightning_muon.schedule.simulate import Timeline, simulate

# The stages per rank that a schedule is made for; the others take any number.
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zb_2p": 1, "zb_v": 2, "v_half": 2, "v_min": 2}
BUILT_IN = [*STAGES_PER_RANK, "interleaved_1f1b", "zb_1p"]


def timeline(order: Order, pipeline: Pipeline) -> Timeline:
    """Of the order alone, with its messages."""
    return simulate(build_program(order, pipeline), pipeline.costs)


def idle_seconds(of: Timeline) -> float:
    """Of the rank that takes longest from its first op to its last."""
    busy = next(iter(of.ranks.values())).compute_seconds
    return busy / (1 - of.bubble) - busy


def fitting(name: str, num_ranks: int, num_microbatches: int, *costs: float) -> Pipeline:
    """A pipeline with the stages per rank of this schedule, 2 for those that take several; costs are f, i and w."""
    seconds = dict(zip(("forward", "backward_input", "backward_weight"), costs, strict=False))
    return Pipeline(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=STAGES_PER_RANK.get(name, 2),
        costs=StageCosts(**seconds),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, Pipeline]:
    """A schedule and a pipeline that it takes, with any costs."""
    name = draw(st.sampled_from(BUILT_IN))
    stages_per_rank = STAGES_PER_RANK.get(name) or draw(st.integers(1, 3))
    num_ranks = draw(st.integers(1, 5))
    least = num_ranks if stages_per_rank == 1 else 1
    is_in_rounds = name == "interleaved_1f1b" or (name == "zb_1p" and stages_per_rank > 1)
    numbers = [n for n in range(least, least + 8) if not (is_in_rounds and n % max(1, n // num_ranks))]
    costs = StageCosts(
        forward=draw(st.integers(1, 9)),
        backward_input=draw(st.integers(1, 9)),
        backward_weight=draw(st.integers(1, 9)),
        communication=draw(st.integers(0, 5)),
        reduce_grad=draw(st.integers(0, 5)),
    )
    return name, Pipeline(
        num_ranks=num_ranks,
        num_microbatches=draw(st.sampled_from(numbers)),
        stages_per_rank=stages_per_rank,
        costs=costs,
    )
