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


def fitting(name: str, num_ranks: int, num_microbatches: int, **options: object) -> Pipeline:
    """A pipeline with the stages per rank of this schedule; 2 for those that take several."""
    stages = {"stages_per_rank": STAGES_PER_RANK.get(name, 2), **options}
    return Pipeline(num_ranks=num_ranks, num_microbatches=num_microbatches, **stages)  # type: ignore[arg-type]


@st.composite
def problems(draw: st.DrawFn, names: list[str] = BUILT_IN) -> tuple[str, Pipeline]:
    """A schedule and a pipeline that it takes, with costs of their own for each stage."""
    name = draw(st.sampled_from(names))
    stages_per_rank = STAGES_PER_RANK.get(name) or draw(st.integers(1, 3))
    num_ranks = draw(st.integers(1, 5))
    least = num_ranks if stages_per_rank == 1 else 1
    is_in_rounds = name == "interleaved_1f1b" or (name == "zb_1p" and stages_per_rank > 1)
    numbers = [n for n in range(least, least + 8) if not (is_in_rounds and n % max(1, n // num_ranks))]
    num_microbatches = draw(st.sampled_from(numbers))
    seconds = st.lists(
        st.integers(1, 9).map(float), min_size=num_ranks * stages_per_rank, max_size=num_ranks * stages_per_rank
    ).map(tuple)
    costs = StageCosts(
        forward=draw(seconds),
        backward_input=draw(seconds),
        backward_weight=draw(seconds),
        communication=float(draw(st.integers(0, 5))),
        reduce_grad=float(draw(st.integers(0, 5))),
    )
    return name, Pipeline(
        num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank, costs=costs
    )
