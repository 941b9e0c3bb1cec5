"""Pipeline schedules as data: a schedule lists forwards and backwards of each rank, passes add all the rest.

From a name to a picture::

    pipeline = Pipeline(num_ranks=4, stages_per_rank=2, num_microbatches=16, costs=StageCosts(communication=0.1))
    order = make_order("zb_v", pipeline)            # for each rank: 0F0, 0F1, ...
    program = build_program(order, pipeline)        # with dependencies and messages
    program = add_optimizer(add_reduce_grad(add_unshard(program)))
    validate_pipeline(program, pipeline)
    timeline = simulate(program, pipeline.costs)    # also for draw_timelines
"""

# All schedules are registered with the package.
from lightning_muon.schedule.pipeline.auto import auto
from lightning_muon.schedule.pipeline.builtin import forward_only
from lightning_muon.schedule.pipeline.checks import check_order, validate_pipeline
from lightning_muon.schedule.pipeline.csv_format import (
    order_from_csv,
    order_to_csv,
    program_from_csv,
    program_to_csv,
)
from lightning_muon.schedule.pipeline.lower import (
    add_optimizer,
    add_reduce_grad,
    add_tied,
    add_unshard,
    build_program,
)
from lightning_muon.schedule.pipeline.nodes import B, F, I, Node, Order, PipelineKind, W, peak_activations, placement
from lightning_muon.schedule.pipeline.problem import Pipeline, StageCosts
from lightning_muon.schedule.pipeline.registry import SCHEDULES, make_order, register_schedule

__all__ = [
    # What a schedule is made for, and what it is.
    "Pipeline",
    "StageCosts",
    "Node",
    "Order",
    "F",
    "B",
    "I",
    "W",
    # Schedules.
    "SCHEDULES",
    "register_schedule",
    "make_order",
    "forward_only",
    "auto",
    "check_order",
    "peak_activations",
    "placement",
    # Programs.
    "PipelineKind",
    "build_program",
    "add_unshard",
    "add_reduce_grad",
    "add_tied",
    "add_optimizer",
    "validate_pipeline",
    # Files.
    "order_from_csv",
    "order_to_csv",
    "program_from_csv",
    "program_to_csv",
]
