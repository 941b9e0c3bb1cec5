"""Ranges that torch.profiler sees: the ops of the program of a step, in their order, nested in the step."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.distributed.test_step_program import start
from tests.support.processes import ProcessPool

PREFIX = "lightning_muon::"
Event = tuple[str, float, float]  # Name, begin, end.


def ranges_of(profile: torch.profiler.profile) -> list[Event]:
    """The ranges of the package in the order in which they begin; those of one thread lie in each other or apart."""
    events = [each for each in profile.events() or () if each.name.startswith(PREFIX)]
    found = [(each.name.removeprefix(PREFIX), each.time_range.start, each.time_range.end) for each in events]
    found.sort(key=lambda each: (each[1], -each[2]))
    open_ends: list[float] = []
    for _, begin, end in found:
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], "they overlap"
        open_ends.append(end)
    return found


def _profiled(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Ranges of the second step, and the ops that its program has."""
    mode, net, optimizer = start(name, shape, options)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    for step in range(2):
        optimizer.zero_grad()
        inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        if step:
            profile.start()
        F.mse_loss(net(inputs), inputs.roll(1, 1)).backward()
        mode.finish_gradients()
        optimizer.step()
        mode.end_step()
    mode.finish_parameters()
    profile.stop()
    assert optimizer._planned is not None
    (whole,) = (e.time_range for e in profile.events() or () if e.name.startswith("Optimizer.step#"))
    products = [e.time_range for e in profile.events() or () if e.name in ("aten::addmm", "aten::baddbmm", "aten::mm")]
    return {
        "ranges": ranges_of(profile),
        "step": (whole.start, whole.end),
        "products": [(each.start, each.end) for each in products],
        "in step": [op.name for op in optimizer._planned.plan.ops],
    }


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("fsdp", (2,), {"overlap": "step"}),
        ("fsdp", (2,), {"overlap": "off"}),
        ("zero2", (2,), {}),
        ("ddp", (2,), {}),
        ("flexdemo", (2, 1), {"base": "muon"}),
    ],
)
def test_ops_of_a_step_are_ranges(
    gloo: ProcessPool, name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    for found in gloo.run(_profiled, name, shape, options, world_size=2):
        begun, ended = found["step"]
        inside = [each for each in found["ranges"] if begun <= each[1] and each[2] <= ended]
        names = [
            text
            for text, _, _ in inside
            if not text.startswith(("agree", "wait", "send", "nodes", "exchange", "decode"))
        ]
        assert names == found["in step"]
        assert inside[0][0] == "agree[gradients]"
        waits = [text for text, *_ in found["ranges"] if text.startswith("wait_values")]
        before = [
            text for text, _, end in found["ranges"] if end <= begun and text not in (*waits, "agree[parameters]")
        ]
        kind = {"ddp": "all_reduce", "zero2": "reduce_scatter"}.get(name, "")
        assert bool(before) == bool(kind) and all(text.startswith(f"{kind}[parameters.") for text in before)
        products = [each for each in found["products"] if begun <= each[0] and each[1] <= ended]
        rounds = [each for each in inside if each[0].startswith("newton_schulz")]
        assert products, "a rank that owns no matrix proves nothing"
        assert all(any(start <= low and high <= end for _, start, end in rounds) for low, high in products)
        # Of the step before, and of this one.
        values = [text for text, _, _ in inside if text.startswith("send_values[parameters.")]
        assert bool(values) == (name == "zero2")
        assert sorted(waits) == sorted(2 * [text.replace("send", "wait") for text in values])
