"""Every mode trains like one process; what ZeRO-2 holds, and states that go from one layout to another."""

import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_muon import ParallelMuon
from lightning_muon.sharding.base import ModeOptions
from lightning_muon.sharding.modes import make_mode
from tests.distributed.sharding.training import (
    OddNet,
    Run,
    Training,
    branch_by_rank,
    largest_difference,
    loss,
    mesh_of,
    model,
    optimizer_for,
    train,
    train_alone,
)
from tests.support.processes import ProcessPool

RUNS = {
    "plain": Run(),
    "accumulated": Run(accumulate=3),
    "clipped": Run(max_norm=0.3),
    "branches that differ by rank": Run(branch_of=branch_by_rank, accumulate=2, max_norm=0.5),
}
# fsdp: parameters that only some ranks use are tested in tests/distributed/sharding/test_fsdp.py.
ODD = list(RUNS)[-1]
CASES = [
    *((mode, shape, ODD) for mode in ("zero2", "ddp") for shape in ((1,), (2, 2))),
    # ODD accumulates and clips, too; without branches each of the two is tried in one of these modes.
    *(
        (mode, (3,), name)
        for mode, other in (("zero2", "accumulated"), ("ddp", "clipped"))
        for name in ("plain", other, ODD)
    ),
    ("zero2", (4,), ODD),
    *(("fsdp", (3,), name) for name in ("plain", "accumulated")),
    *(("fsdp", shape, "clipped") for shape in ((1,), (4,), (2, 2))),
    ("fsdp", (4, 1), "accumulated"),
]


@pytest.mark.parametrize(("mode", "shape", "run"), CASES, ids=str)
def test_weights_are_those_of_one_process(gloo: ProcessPool, mode: str, shape: tuple[int, ...], run: str) -> None:
    size = math.prod(shape)
    expected = train_alone(RUNS[run], size)
    results = gloo.run(train, mode, shape, RUNS[run], {"bucket_bytes": 600}, world_size=size)
    for weights in results:
        difference, name = largest_difference(weights, expected)
        # Sums of float32 in another order; Newton-Schulz makes more of it where a gradient has small singular values.
        assert difference < 1e-6, name
        # Replicas have the same bits.
        assert mode == "fsdp" or all(torch.equal(results[0][name], weights[name]) for name in weights)


def _train_and_lose(mode: str, how: str, ranks: tuple[int, ...], *, after_backward: bool) -> dict[str, Tensor]:
    """Four steps; before or after the backward pass of the third, ``ranks`` lose state."""
    training = Training.start(mode, mesh_of((2,)))
    for step in range(4):
        is_lost = step == 2 and dist.get_rank() in ranks
        training.optimizer.zero_grad()
        if is_lost and not after_backward:
            _lose(training.net, training.optimizer, how)
        loss(training.net, Run(), step, 0, dist.get_rank()).backward()
        if is_lost and after_backward:
            _lose(training.net, training.optimizer, how)
        training.mode.finish_gradients()
        training.optimizer.step()
    return training.weights()


def _lose_alone(how: str) -> dict[str, Tensor]:
    net = model()
    optimizer = optimizer_for(net)
    for step in range(4):
        if step == 2:
            _lose(net, optimizer, how)
        optimizer.zero_grad()
        for rank in range(2):
            (loss(net, Run(), step, 0, rank) / 2).backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def _lose(net: OddNet, optimizer: ParallelMuon, how: str) -> None:
    if how == "all":
        optimizer.state.clear()
    elif how == "keys":  # Other keys in their places: as many as before.
        optimizer.state[net.blocks[0].up.weight] = {"other": 0}
        optimizer.state[net.blocks[1].norm.weight].pop("exp_avg")
        optimizer.state[net.blocks[1].norm.weight]["other"] = 0
    else:
        optimizer.state.pop(net.blocks[0].up.weight)
        optimizer.state.pop(net.scale)


# Ranks that lose it, and whether after the backward pass.
LOSSES = [((0, 1), False), ((1,), False), ((1,), True)]


@pytest.mark.parametrize(
    ("mode", "how", "losses"),
    [
        ("fsdp", "some", LOSSES),
        ("fsdp", "all", LOSSES[::2]),
        ("fsdp", "keys", LOSSES[1:2]),
        ("zero2", "some", LOSSES[:2]),
        ("ddp", "some", LOSSES[2:]),
    ],
)
def test_state_that_is_lost_on_any_rank_begins_with_zeros_on_all(
    gloo: ProcessPool, mode: str, how: str, losses: list[tuple[tuple[int, ...], bool]]
) -> None:
    """Also that of 0-d parameters, of which each rank has a copy."""
    expected = _lose_alone(how)
    for ranks, after_backward in losses:
        for found in gloo.run(
            _train_and_lose, mode, how, ranks, after_backward=after_backward, world_size=2, timeout=30
        ):
            assert largest_difference(found, expected)[0] < 1e-6


def _held(shape: tuple[int, ...]) -> tuple[dict[str, int], list[bool], int, int]:
    """Elements of state and of gradients, which ``p.grad`` exist after backward, elements of the largest tensor.

    Last the number of gradients that are still in memory after the step.
    """
    training = Training.start("zero2", mesh_of(shape), bucket_bytes=600)
    loss(training.net, Run(), 0, 0, dist.get_rank()).backward()
    training.mode.finish_gradients()
    layout = training.mode.layout
    parameters = [p for p in training.net.parameters() if p.requires_grad]
    gradients = [layout.gradient(parameter) for parameter in parameters]
    states = [
        value.to_local() if isinstance(value, DTensor) else value
        for parameter in parameters
        for key, value in training.optimizer.state[parameter].items()
        if key != "step"
    ]
    held = {
        "gradients": sum(gradient.numel() for gradient in gradients if gradient is not None),
        "state": sum(state.numel() for state in states),
    }
    whole = [parameter.grad is not None for parameter in parameters]
    # A step that knows which gradients to expect, as all but the first do.
    training.optimizer.step()
    loss(training.net, Run(), 1, 0, dist.get_rank()).backward()
    training.mode.finish_gradients()
    alive = [weakref.ref(gradient) for p in parameters if (gradient := layout.gradient(p)) is not None]
    del gradients, gradient
    training.optimizer.step()
    training.optimizer.zero_grad()
    num_alive = sum(reference() is not None for reference in alive)
    return held, whole, max(p.numel() for p in parameters), num_alive


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)])
def test_gradients_and_state_are_sharded(gloo: ProcessPool, shape: tuple[int, ...]) -> None:
    size = torch.Size(shape).numel()
    (alone, *_), *_ = gloo.run(_held, (1,), world_size=1)
    results = gloo.run(_held, shape, world_size=size)
    for held, whole_gradients, largest, num_alive in results:
        assert not any(whole_gradients) and num_alive == 0
        for kind, count in held.items():
            # No rank has much more than its share: at most one matrix, or the rows that do not divide.
            assert count <= alone[kind] / shape[-1] + 2 * largest
    for kind, count in alone.items():
        # One 0-d parameter is on every rank, with two moments.
        extra = (size - size // shape[-1]) * (1 if kind == "gradients" else 2)
        assert sum(held[kind] for held, *_ in results) == count * size // shape[-1] + extra


def _states(training: Training) -> list[Tensor]:
    saved = training.optimizer.state_dict()["state"].values()
    return [getattr(v, "_local_tensor", v).clone() for state in saved for key, v in state.items() if key != "step"]


def _with_a_hole() -> dict[str, Tensor]:
    training = Training.start("zero2", mesh_of((2,)))
    training.step(Run(), 0)
    training.optimizer.zero_grad()
    loss(training.net, Run(), 1, 0, dist.get_rank()).backward()
    training.mode.finish_gradients()
    gradient = training.mode.layout.gradient(training.net.blocks[0].up.weight)
    assert gradient is not None
    if gradient.numel():
        gradient[0, 0] = torch.nan
    before, states = training.weights(), _states(training)
    training.optimizer.step()
    training.mode.end_step()
    assert training.optimizer.skipped_steps == 1
    assert all(map(torch.equal, states, _states(training)))
    weights = training.weights()
    assert all(torch.equal(before[name], weights[name]) for name in before)
    training.step(Run(), 2)
    return training.weights()


def test_a_nan_on_the_owner_skips_the_step_everywhere(gloo: ProcessPool) -> None:
    first, second = gloo.run(_with_a_hole, world_size=2)
    assert all(torch.equal(first[name], second[name]) and first[name].isfinite().all() for name in first)


def _too_early(sharding: Any) -> None:
    with make_mode(sharding, init_device_mesh("cpu", (dist.get_world_size(),)), ModeOptions()).no_sync():
        pass


@pytest.mark.parametrize("sharding", ["fsdp", "zero2"])
def test_a_mode_that_is_not_attached_says_so(gloo: ProcessPool, sharding: str) -> None:
    match = r"call mode.prepare\(module\) and mode.attach\(module, optimizers\) first"
    gloo.expect_error_on_all_ranks(_too_early, sharding, world_size=1, exception=RuntimeError, match=match)


def _gradient(divisor: float | None, *, is_finished_between: bool = False) -> float:
    net = nn.Linear(1, 1, bias=False)
    mode = make_mode("none", init_device_mesh("cpu", (dist.get_world_size(),)), ModeOptions())
    mode.prepare(net)
    mode.attach(net, [torch.optim.SGD(net.parameters())])
    mode.set_gradient_divisor(divisor)
    with mode.no_sync():
        net(torch.ones(1, 1)).sum().backward()
    if is_finished_between:
        mode.finish_gradients()
    net(torch.ones(1, 1)).sum().backward()
    mode.finish_gradients()
    mode.finish_gradients()  # Again before clipping, for example: nothing is divided twice.
    assert net.weight.grad is not None
    return net.weight.grad.item()


@pytest.mark.parametrize(("world_size", "match"), [(1, "zero_grad"), (2, "there are 2 data-parallel ranks")])
def test_added_passes_and_several_ranks_are_errors(gloo: ProcessPool, world_size: int, match: str) -> None:
    gloo.expect_error_on_all_ranks(_gradient, 3.0, is_finished_between=True, world_size=world_size, match=match)
