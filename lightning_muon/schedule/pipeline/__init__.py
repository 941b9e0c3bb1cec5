"""Pipeline schedules as data: a schedule lists forwards and backwards of each rank, passes add all other ops.

docs/extend.md has an example, from a name to a timeline.
"""

from lightning_muon.schedule.pipeline.builtin import (
    SCHEDULES,
    find_schedule,
    forward_only,
    make_order,
    phases,
    register_schedule,
)
from lightning_muon.schedule.pipeline.lower import (
    add_reduce_grad,
    add_tied,
    add_unshard,
    build_program,
)
from lightning_muon.schedule.pipeline.nodes import (
    B,
    F,
    I,
    Node,
    Order,
    Pipeline,
    PipelineKind,
    StageCosts,
    W,
    order_from_csv,
    order_to_csv,
    peak_activations,
    stage_ranks,
)
from lightning_muon.schedule.pipeline.play import check_order

__all__ = [
    # Input and output of a schedule.
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
    "find_schedule",
    "make_order",
    "forward_only",
    "phases",
    "check_order",
    "peak_activations",
    "stage_ranks",
    # Programs.
    "PipelineKind",
    "build_program",
    "add_unshard",
    "add_reduce_grad",
    "add_tied",
    # Files.
    "order_from_csv",
    "order_to_csv",
]
