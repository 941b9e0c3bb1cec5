"""A rank that differs from the others: an error on all of them or the same weights on all, and never a hang.

What ranks must know of each other before a step travels in two messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_muon import NonFiniteGradientError, ParallelMuon
from tests.distributed.sharding.test_traffic import MESSAGE, Wire
from tests.distributed.sharding.training import Training, mesh_of
from tests.support import family
from tests.support.processes import ProcessPool


def _parameter(seed: int, shape: tuple[int, ...], mesh: DeviceMesh, placement: Any = None) -> nn.Parameter:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    parameter = nn.Parameter(distribute_tensor(tensor, mesh, [placement or Shard(0)], src_data_rank=None))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def _fails_on_rank_1(matrices: Tensor, *, newton_schulz: Callable[[Tensor], Tensor]) -> Tensor:
    return newton_schulz(matrices) if dist.get_rank() != 1 else matrices[0]


def _error(options: dict[str, Any], of_rank_1: dict[str, Any], later: str = "") -> str:
    """What the step raises; rank 1 has options of its own, or changes something after the first step."""
    mesh, is_wrong = mesh_of((dist.get_world_size(),)), dist.get_rank() == 1
    weight, bias = _parameter(0, (8, 4), mesh), _parameter(1, (8,), mesh)
    local = nn.Parameter(torch.ones(4 if is_wrong and later == "local" else 3, 3))
    named = [("weight", weight), ("bias", bias), ("local", local)]
    options = options | {"mesh": mesh if later == "local" else None} | (of_rank_1 if is_wrong else {})
    try:
        optimizer = ParallelMuon(named, **options)
        if later:
            optimizer.step()
        if is_wrong and later == "added":
            optimizer.add_param_group({"params": [("extra", nn.Parameter(torch.ones(3)))], "algorithm": "adamw"})
            optimizer.add_param_group({"params": [("more", _parameter(2, (8, 2), mesh))]})
        optimizer.step()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


DIFFERS = "RuntimeError: .*"
FAILED = "RuntimeError: rank 1 of the group failed"


@pytest.mark.parametrize(
    ("arguments", "on_rank_1", "on_others"),
    [
        (({}, {"ns_steps": 3}), *2 * [DIFFERS + "'ns_steps of the group of weight' 5, rank 1 has .* 3"]),
        (({}, {"orthogonalize": family.muon_eq}), *2 * [DIFFERS + "'orthogonalize of .*' 'newton_schulz', rank 1 has"]),
        (({}, {}, "local"), *2 * [DIFFERS + r"local.*\(4, 3\)"]),
        (({}, {}, "added"), *2 * [DIFFERS + "(more|bias|settings)"]),
        (({}, {"adamw_patterns": ("nothing.*",)}), "ValueError", FAILED),
        (({"orthogonalize": _fails_on_rank_1}, {}), r"TypeError.*returned \(2, 3\) torch", FAILED),
    ],
)
def test_what_differs_on_one_rank_is_an_error_on_all(
    gloo: ProcessPool, arguments: Any, on_rank_1: str, on_others: str
) -> None:
    first, wrong, last = gloo.run(_error, *arguments, world_size=3, timeout=30)
    assert re.match(on_rank_1, wrong, re.DOTALL)
    assert re.match(on_others, first, re.DOTALL) and re.match(on_others, last, re.DOTALL)


def _nan_in_a_small_mesh() -> None:
    """Experts on meshes of two ranks, dense weights on all four, a local bias; the NaN is in one expert."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    dense, expert = _parameter(0, (8, 4), mesh_of((dist.get_world_size(),))), _parameter(1, (4, 4), grid["expert"])
    local = nn.Parameter(torch.ones(3, 3))
    local.grad = torch.ones(3, 3)
    optimizer = ParallelMuon([("dense", dense), ("expert", expert), ("local", local)], max_skipped_steps=0)
    optimizer.step()
    before = [dense.to_local().clone(), expert.to_local().clone(), local.clone()]  # type: ignore[attr-defined]
    if dist.get_rank() == 3:
        expert.grad.to_local().fill_(torch.nan)  # type: ignore[union-attr]
    try:
        optimizer.step()
    finally:
        after = [dense.to_local(), expert.to_local(), local]  # type: ignore[attr-defined]
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_nan_on_a_small_mesh_stops_the_ranks_of_the_large_one(gloo: ProcessPool) -> None:
    message = "gradient of (expert|a parameter of another mesh)"
    gloo.expect_error_on_all_ranks(
        _nan_in_a_small_mesh, match=message, exception=NonFiniteGradientError, world_size=4, timeout=30
    )


def _unsharded_module() -> list[str]:
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 4), nn.Linear(4, 20))
    fully_shard(model, mesh=mesh_of((dist.get_world_size(),)))
    early, late = ParallelMuon(model), ParallelMuon(model.parameters())
    with torch.no_grad():
        model(torch.arange(4))
    found = [route.algorithm for route in early.routes]
    try:
        late.attach(model)
    except RuntimeError as error:
        found.append(str(error))
    model.reshard()
    late.attach(model)
    return [*found, *(route.algorithm for route in late.routes)]


def test_routes_outlive_a_forward_pass_that_unshards_the_module(gloo: ProcessPool) -> None:
    for found in gloo.run(_unsharded_module, world_size=2):
        expected = ["adamw", "muon", "adamw", "adamw", "adamw"]
        assert found[:5] == found[6:] == expected
        assert "Call module.reshard() first" in found[5]


FLEXDEMO = [("flexdemo", (2, 2)), ("flexdemo", (4, 1))]


def _notes_of_fourth_step(name: str, shape: tuple[int, ...]) -> int:
    """Collectives of whole numbers and of objects: what is no gradient, update, value or norm."""
    training = Training.start(name, mesh_of(shape))
    for step in range(4):
        with Wire() as wire:
            training.backward(step)
            training.mode.clip_grad_norm_(training.optimizer, 1.0)
            training.optimizer.step()
    training.mode.finish_parameters()
    # Nodes send each other bytes.
    return sum(not each.is_payload and each.operator not in (MESSAGE, "recv_") for each in wire.sent)


@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, shape) for name in ("fsdp", "zero2") for shape in ((4,), (2, 2))), ("ddp", (4,)), *FLEXDEMO],
)
def test_two_notes_to_each_other_are_sent_in_a_step(gloo: ProcessPool, name: str, shape: tuple[int, ...]) -> None:
    """One ends the reduction of gradients, with FSDP2 where a node has several ranks; the other begins the step."""
    assert set(gloo.run(_notes_of_fourth_step, name, shape, world_size=4)) == {1 if shape == (4, 1) else 2}


# What a callback on one rank may do between the end of backward and the step.
CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "gradient is gone": lambda weight, _: setattr(weight, "grad", None),
    "gradient is new": lambda _, training: setattr(training.net.tail.unused.weight, "grad", torch.ones(5, 3)),
    "NaN": lambda weight, _: weight.grad.mul_(float("nan")),
    "frozen": lambda weight, _: weight.requires_grad_(False),
    "state is gone": lambda weight, training: training.optimizer.state.pop(weight),
    "momentum is wrong": lambda _, training: training.optimizer.param_groups[0].update(momentum="much"),
    "gradients are gone": lambda _, training: training.optimizer.zero_grad(),
}
KINDS = {
    "ddp": ["gradient is gone", "gradient is new", "NaN", "frozen", "state is gone"],
    "zero2": ["state is gone", "momentum is wrong", "gradients are gone", "frozen"],
    "fsdp": ["gradient is gone", "NaN", "frozen", "state is gone"],
}


def _changed_on_one_rank(name: str, kind: str) -> tuple[list[Tensor], int, str]:
    training, error = Training.start(name, mesh_of((2,))), ""
    for step in range(3):
        training.backward(step)
        if step == 2 and dist.get_rank() == 1:
            CHANGES[kind](training.net.blocks[0].up.weight, training)  # type: ignore[union-attr]
        try:
            training.optimizer.step()
        except (RuntimeError, ValueError) as problem:
            error = str(problem)
    return list(training.weights().values()), training.optimizer.skipped_steps, error


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in KINDS.items() for kind in kinds])
def test_what_one_rank_changes_before_the_step_reaches_all(gloo: ProcessPool, name: str, kind: str) -> None:
    (first, skipped, error), (second, other_skipped, other_error) = gloo.run(
        _changed_on_one_rank, name, kind, world_size=2
    )
    assert skipped == other_skipped == (kind == "NaN")
    assert bool(error) == bool(other_error) == (kind in ("frozen", "momentum is wrong", "state is gone"))
    assert all(map(torch.equal, first, second))
