"""A rank that differs from the others: an error on all of them or the same weights on all, and never a hang."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_muon import NonFiniteGradientError, ParallelMuon
from lightning_muon.params.layout import local_tensor
from tests.support import family
from tests.support.processes import ProcessPool


def _line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _parameter(seed: int, shape: tuple[int, ...], mesh: DeviceMesh, placement: Any = None) -> nn.Parameter:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    parameter = nn.Parameter(distribute_tensor(tensor, mesh, [placement or Shard(0)], src_data_rank=None))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def _wrong_on_rank_1(options: dict[str, Any], later: str) -> None:
    mesh, is_wrong = _line(), dist.get_rank() == 1
    weight, bias = _parameter(0, (8, 4), mesh), _parameter(1, (8,), mesh)
    optimizer = ParallelMuon([("weight", weight), ("bias", bias)], **(options if is_wrong else {}))
    if later:
        optimizer.step()
    if is_wrong and later == "frozen":
        weight.requires_grad_(False)
    if is_wrong and later == "added":
        optimizer.add_param_group({"params": [("extra", nn.Parameter(torch.ones(3)))], "algorithm": "adamw"})
        optimizer.add_param_group({"params": [("more", _parameter(2, (8, 2), mesh))]})
    optimizer.step()


@pytest.mark.parametrize(
    ("options", "later", "match"),
    [
        ({"ns_steps": 3}, "", "'ns_steps of the group of weight' 5, rank 1 has .* 3"),
        ({"lr": 0.5}, "", "'lr of the group of weight' .* 0.5"),
        ({"orthogonalize": family.muon_eq}, "", "'orthogonalize of the group of weight' 'newton_schulz', rank 1 has"),
        ({}, "frozen", "trainable=False"),
        ({}, "added", "more|bias|settings"),
    ],
)
def test_a_difference_is_named_on_all_ranks(gloo: ProcessPool, options: dict[str, Any], later: str, match: str) -> None:
    gloo.expect_error_on_all_ranks(
        _wrong_on_rank_1, options, later, match=match, exception=RuntimeError, world_size=3, timeout=30
    )


def _message(options: dict[str, Any]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        _wrong_on_rank_1(options, "")
    return f"{error.typename}: {error.value}"


_WRONG: list[dict[str, Any]] = [
    {"adamw_patterns": ("nothing.*",)},
    {"algorithm": "muon"},
]


@pytest.mark.parametrize("options", _WRONG, ids=str)
def test_an_error_on_one_rank_ends_the_others(gloo: ProcessPool, options: dict[str, Any]) -> None:
    first, wrong, last = gloo.run(_message, options, world_size=3, timeout=30)
    assert wrong.startswith("ValueError")
    assert all(message.startswith("RuntimeError: rank 1 of the group failed") for message in (first, last))


def _fails_on_rank_1(matrices: Tensor, *, newton_schulz: Callable[[Tensor], Tensor]) -> Tensor:
    return newton_schulz(matrices) if dist.get_rank() != 1 else matrices[0]


def _step_with_a_failing_function() -> str:
    optimizer = ParallelMuon([("weight", _parameter(0, (8, 4), _line()))], orthogonalize=_fails_on_rank_1)
    with pytest.raises((TypeError, RuntimeError)) as error:
        optimizer.step()
    return str(error.value)


def test_a_function_that_fails_on_one_rank_ends_the_others(gloo: ProcessPool) -> None:
    first, wrong, last = gloo.run(_step_with_a_failing_function, world_size=3, timeout=30)
    assert "returned (2, 3) torch" in wrong
    assert all("rank 1 of the group failed" in message for message in (first, last))


def _nan_in_a_small_mesh() -> None:
    """Experts on meshes of two ranks, dense weights on all four, a local bias; the NaN is in one expert."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    dense, expert = _parameter(0, (8, 4), _line()), _parameter(1, (4, 4), grid["expert"])
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


def _missing_on_a_replica(kind: str) -> list[Tensor]:
    """Two steps; in the first only rank 0 has gradients. Returns local weights and states."""
    mesh = _line()
    torch.manual_seed(0)
    tensors = {"weight": torch.randn(6, 5), "bias": torch.randn(5)}
    if kind == "plain":
        parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
    else:
        parameters = {name: nn.Parameter(distribute_tensor(t, mesh, [Replicate()])) for name, t in tensors.items()}
    optimizer = ParallelMuon(parameters.items(), lr=0.1, mesh=mesh if kind == "plain" else None)
    for step in range(2):
        for name, parameter in parameters.items():
            grad = torch.full_like(tensors[name], 1.0 + step)
            placed = grad if kind == "plain" else distribute_tensor(grad, mesh, [Replicate()], src_data_rank=None)
            parameter.grad = placed if step or dist.get_rank() == 0 else None
        optimizer.step()
    found = [p.detach() for p in parameters.values()]
    found += [v for p in parameters.values() for k, v in optimizer.state[p].items() if k != "step"]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found]


@pytest.mark.parametrize("kind", ["plain", "DTensor"])
def test_replicas_stay_equal_when_some_lack_a_gradient(gloo: ProcessPool, kind: str) -> None:
    first, *others = gloo.run(_missing_on_a_replica, kind, world_size=3)
    # (1/3) of ones, then twos: the mean over the replicas, a missing gradient being zero.
    momentum = 0.05 * (1 / 3) * 0.95 + 0.05 * 2.0
    torch.testing.assert_close(first[2], torch.full((6, 5), momentum))
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def _unsharded_module() -> list[str]:
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 4), nn.Linear(4, 20))
    fully_shard(model, mesh=_line())
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


def _bad_on_rank_1(key: str, value: Any, when: str) -> list[bool]:
    """Whether the step raises, whether nothing changed, and whether the next steps are as if nothing had been."""
    results: list[list[Tensor]] = []
    found: list[bool] = []
    for is_tried in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 13), nn.Linear(13, 7), nn.Linear(7, 3))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = ParallelMuon(model, lr=0.02, compute_dtype="float32", bucket_bytes=1)
        for step in range(4):
            is_bad = is_tried and step == 2
            before = [local_tensor(parameter.detach()).clone() for parameter in model.parameters()]
            was = optimizer.param_groups[0][key]
            if is_bad and when == "before backward" and dist.get_rank() == 1:
                optimizer.param_groups[0][key] = value
            model(torch.full((2, 5), 0.1 * step)).square().sum().backward()
            if is_bad and dist.get_rank() == 1:
                optimizer.param_groups[0][key] = value
            if is_bad:
                try:
                    optimizer.step()
                except (ValueError, RuntimeError) as error:
                    found.append(key in str(error))
                optimizer.param_groups[0][key] = was
                after = [local_tensor(parameter.detach()) for parameter in model.parameters()]
                found.append(all(torch.equal(one, other) for one, other in zip(before, after, strict=True)))
            optimizer.step()
            optimizer.zero_grad()
        results.append([local_tensor(parameter.detach()) for parameter in model.parameters()])
    return [*found, all(torch.equal(one, other) for one, other in zip(*results, strict=True))]


@pytest.mark.parametrize(("key", "value"), [("momentum", "0.9"), ("adjust_lr_fn", "other"), ("betas", 3)])
def test_a_bad_value_of_one_rank_is_an_error_on_all(gloo: ProcessPool, key: str, value: Any) -> None:
    for when in ("before backward", "after backward"):
        for found in gloo.run(_bad_on_rank_1, key, value, when, world_size=2, timeout=30):
            assert found == [True, True, True]
