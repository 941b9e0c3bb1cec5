"""Registry of schedules by name, to which users can add their own."""

from __future__ import annotations

from collections.abc import Callable

from lightning_muon.config import nearest
from lightning_muon.schedule.pipeline.checks import check_order
from lightning_muon.schedule.pipeline.nodes import Node, Order
from lightning_muon.schedule.pipeline.problem import Pipeline

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
        hint = nearest(name, list(SCHEDULES))
        meant = f"did you mean {hint!r}?" if hint else f"there are {', '.join(SCHEDULES)}"
        raise ValueError(f"there is no schedule {name!r}; {meant}")
    return SCHEDULES[name]


def make_order(name: str, pipeline: Pipeline) -> Order:
    """The schedule of this name for a pipeline, checked for completeness, deadlock and its memory limit."""
    schedule = find_schedule(name)
    try:
        order = [[Node(*node) for node in nodes] for nodes in schedule(pipeline)]
        check_order(order, pipeline)
    except ValueError as error:
        raise ValueError(f"schedule {name!r}: {error}") from error
    except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"schedule {name!r} fails with {type(error).__name__}: {error}; "
            "it takes a Pipeline and returns a list of F, B, I and W for each rank"
        ) from error
    return order
