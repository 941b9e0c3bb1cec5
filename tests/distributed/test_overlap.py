"""Transfers behind arithmetic: the same weights bit for bit, however buckets and owners lie."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_muon import NonFiniteGradientError, ParallelMuon
from lightning_muon.params.layout import local_tensor
from tests.distributed.backward_passes import (
    BACKWARDS,
    Net,
    branch_on_some_ranks,
    clipped,
    make_optimizer,
    plain,
    sharded,
    tokens,
)
from tests.support.processes import ProcessPool
from tests.support.recorded_ops import recorded_ops
from tests.support.tensors import are_equal, weights_of

NUM_STEPS = 4


def _train(
    mesh_shape: tuple[int, ...], options: dict[str, Any], backward: Callable[[Net, ParallelMuon, int], None]
) -> dict[str, Tensor]:
    """The weights after some steps, each of which runs the program that was checked, op by op."""
    model = sharded(mesh_shape)
    optimizer = make_optimizer(model, **options)
    with recorded_ops() as recorded:
        for step in range(NUM_STEPS):
            backward(model, optimizer, step)
            optimizer.step()
            assert any(name.startswith("update") for name in recorded.check())
    return weights_of(model)


def _compare(
    mesh_shape: tuple[int, ...], variants: list[dict[str, Any]], backward: Callable[..., None], **common: Any
) -> list[str]:
    """Names of weights that differ from those of a step without any overlap."""
    expected, different = _train(mesh_shape, {"overlap": "off", **common}, backward), list[str]()
    for options in variants:
        weights = _train(mesh_shape, common | options, backward)
        different += [f"{options} {name}" for name in weights if not torch.equal(weights[name], expected[name])]
    return different


@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda function: function.__name__.strip("_"))
def test_overlap_gives_the_weights_of_a_serial_step(gloo: ProcessPool, backward: Callable[..., None]) -> None:
    # Where one rank differs, there are two others that do not.
    size = 3 if backward is branch_on_some_ranks else 2
    for differences in gloo.run(_compare, (size,), [{}], backward, world_size=size):
        assert differences == []


VARIANTS = [
    {"look_ahead": look_ahead, "assignment": assignment, "bucket_bytes": bucket_bytes}
    for look_ahead, assignment, bucket_bytes in (
        (1, "round_robin", 700),
        (2, "redundant", 1),
        (1, "lpt", 700),
        (3, "round_robin", 1),
        (2, "lpt", 10**6),
    )
]


# Every variant on three ranks, and what the size or replicas change; two ranks are those of the test above.
@pytest.mark.parametrize(
    ("mesh_shape", "variants", "backward"),
    [
        ((3,), VARIANTS, plain),
        ((4,), VARIANTS[1:2], plain),
        ((2, 2), [VARIANTS[3], {"dedupe": "always"}], plain),
        ((2, 2), [{"dedupe": "always"}], clipped),
    ],
)
def test_every_schedule_gives_the_same_bits(
    gloo: ProcessPool, mesh_shape: tuple[int, ...], variants: list[dict[str, Any]], backward: Callable[..., None]
) -> None:
    world_size = torch.Size(mesh_shape).numel()
    for differences in gloo.run(_compare, mesh_shape, variants, backward, world_size=world_size):
        assert differences == []


def _step_over_nan() -> tuple[bool, bool]:
    """A NaN reaches the step: is nothing changed, and does the next step work?"""
    model = sharded((dist.get_world_size(),))
    optimizer = make_optimizer(model, max_skipped_steps=0)
    plain(model, optimizer, 0)
    optimizer.step()

    def snapshot() -> list[Tensor]:
        momenta = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
        return [local_tensor(tensor.detach()).clone() for tensor in (*model.parameters(), *momenta)]

    before = snapshot()
    optimizer.zero_grad()
    loss = model(tokens(1)).square().mean()
    (loss * (float("nan") if dist.get_rank() == 0 else 1.0)).backward()
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    unchanged = are_equal(before, snapshot())
    plain(model, optimizer, 2)
    optimizer.step()
    return unchanged, all(tensor.isfinite().all() for tensor in snapshot())


def test_a_step_that_is_given_up_leaves_nothing_behind(gloo: ProcessPool) -> None:
    assert gloo.run(_step_over_nan, world_size=2) == [(True, True)] * 2
