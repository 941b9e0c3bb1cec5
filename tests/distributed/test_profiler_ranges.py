"""Ranges that torch.profiler sees: the ops of a step as docs/monitor.md names them, nested in the step."""

import pytest
import torch

from tests.distributed.sharding.training import Training, mesh_of
from tests.support.processes import ProcessPool

PREFIX = "lightning_muon::"
Event = tuple[str, float, float]  # Name, begin, end.
OPS = ["momentum", "gather", "newton_schulz", "scatter", "update", "adamw"]


def ranges_of(profile: torch.profiler.profile) -> list[Event]:
    """The ranges of the package in the order in which they begin."""
    events = [each for each in profile.events() or () if each.name.startswith(PREFIX)]
    found = [(each.name.removeprefix(PREFIX), each.time_range.start, each.time_range.end) for each in events]
    return sorted(found, key=lambda each: (each[1], -each[2]))


def _profiled(name: str, shape: tuple[int, ...]) -> tuple[list[Event], Event, list[Event]]:
    """Ranges of the second step, the step itself, and its matrix products."""
    training = Training.start(name, mesh_of(shape), bucket_bytes=300)
    training.step(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        training.step(1)
        training.mode.finish_parameters()
    events = [(each.name, each.time_range.start, each.time_range.end) for each in profile.events() or ()]
    (step,) = (each for each in events if each[0].startswith("Optimizer.step#"))
    products = [each for each in events if each[0] in ("aten::addmm", "aten::baddbmm", "aten::mm")]
    return ranges_of(profile), step, [each for each in products if step[1] <= each[1] and each[2] <= step[2]]


@pytest.mark.parametrize(
    ("name", "shape"), [("fsdp", (2,)), ("zero2", (2,)), ("ddp", (2,)), ("flexdemo", (2, 1))], ids=str
)
def test_ops_of_a_step_are_ranges(gloo: ProcessPool, name: str, shape: tuple[int, ...]) -> None:
    for ranges, (_, begun, ended), products in gloo.run(_profiled, name, shape, world_size=2):
        inside = [each for each in ranges if begun <= each[1] and each[2] <= ended]
        assert inside[0][0] == "agree[gradients]"
        kinds = [text.partition("[")[0] for text, *_ in inside]
        ops = [op for op in OPS if name == "fsdp" or op not in ("gather", "scatter")]
        assert set(ops) <= set(kinds) and (name == "fsdp" or "gather" not in kinds)
        # The first of each kind come in this order.
        assert [kind for kind in dict.fromkeys(kinds) if kind in ops[:-1]] == ops[:-1]
        rounds = [each for each in inside if each[0].startswith("newton_schulz")]
        assert products, "a rank that owns no matrix proves nothing"
        assert all(any(start <= low and high <= end for _, start, end in rounds) for _, low, high in products)
        before = {text.partition("[")[0] for text, _, end in ranges if end <= begun}
        reduced = {"ddp": {"all_reduce"}, "zero2": {"reduce_scatter"}}.get(name, set())
        assert before - {"wait_values", "agree"} == reduced
        values = [text for text, *_ in inside if text.startswith("send_values[parameters.")]
        waits = [text for text, *_ in ranges if text.startswith("wait_values")]
        assert bool(values) == (name == "zero2")
        # Of the step before, and of this one.
        assert sorted(waits) == sorted(2 * [text.replace("send", "wait") for text in values])
