"""NaN and Inf on one rank are known to all, and skipped for a few steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_muon import NonFiniteGradientError
from lightning_muon.grad_sync.finite import FiniteCheck, find_nonfinite
from tests.support.processes import ProcessPool

_SHAPES = {"rows": (13, 7), "few": (1, 9), "bias": (5,), "replicated": (3, 4), "plain": (2, 3, 5), "factor": ()}


def _parameters() -> dict[str, Tensor]:
    """On a 1-D and on a 2-D mesh, replicated, plain; one without gradient and one frozen with a broken gradient."""
    size = dist.get_world_size()
    one = init_device_mesh("cpu", (size,))
    two = init_device_mesh("cpu", (2, 2) if size == 4 else (1, size))
    layouts: dict[str, Any] = {
        "rows": (one, [Shard(0)]), "few": (two, [Replicate(), Shard(0)]), "bias": (one, [Shard(0)]),
        "replicated": (two, [Replicate(), Replicate()]),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    parameters: dict[str, Tensor] = {}
    for name, shape in _SHAPES.items():
        gradient = torch.randn(shape, generator=generator)
        placed = distribute_tensor(gradient, *layouts[name]) if name in layouts else gradient
        parameters[name] = nn.Parameter(torch.zeros_like(placed))
        parameters[name].grad = placed
    parameters["unused"] = nn.Parameter(distribute_tensor(torch.ones(3, 3), one, [Shard(0)]))
    parameters["frozen"] = nn.Parameter(torch.zeros(2))
    parameters["frozen"].grad = torch.tensor([float("nan"), 1.0])
    return {name: parameter.requires_grad_(name != "frozen") for name, parameter in parameters.items()}


def _break(parameters: dict[str, Tensor], where: dict[int, list[str]], value: float) -> None:
    for name in where.get(dist.get_rank(), []):
        gradient: Any = parameters[name].grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.view(-1)[-1:] = value


def _find(where: dict[int, list[str]], value: float, lacking: dict[int, list[str]]) -> list[str]:
    parameters = _parameters()
    for name in lacking.get(dist.get_rank(), []):
        parameters[name].grad = None
    _break(parameters, where, value)
    names = {parameter: name for name, parameter in parameters.items()}
    return find_nonfinite(list(parameters.values()), names)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e18])
def test_a_nan_on_one_rank_is_named_on_all_ranks(gloo: ProcessPool, value: float) -> None:
    expected = [] if value == 1e18 else ["rows"]
    assert gloo.run(_find, {2: ["rows"]}, value, {}, world_size=3) == [expected] * 3


def test_what_is_broken_on_several_ranks_is_named_once_on_all(gloo: ProcessPool) -> None:
    where = {0: ["few", "rows"], 1: ["plain"], 2: ["few"], 3: ["rows", "factor", "replicated"]}
    lacking = {1: ["rows", "bias"], 0: ["replicated"]}
    assert gloo.run(_find, {}, 0.0, lacking) == [[]] * 4
    results = gloo.run(_find, where, float("nan"), lacking)
    assert all(result == results[0] for result in results)
    assert sorted(results[0]) == ["factor", "few", "plain", "replicated", "rows"]


def _find_on_two_halves(broken_rank: int) -> list[str]:
    """A mesh of two ranks beside the mesh of all of them, as with experts that only some ranks hold."""
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "half"))
    everyone = init_device_mesh("cpu", (4,))
    half = halves.get_local_rank("other")
    large = nn.Parameter(distribute_tensor(torch.ones(9, 2), everyone, [Shard(0)]))
    small = nn.Parameter(distribute_tensor(torch.ones(3, 2), halves["half"], [Shard(0)]))
    large.grad, small.grad = torch.ones_like(large), torch.ones_like(small)
    if dist.get_rank() == broken_rank:
        small.grad.to_local()[0, 0] = torch.inf  # type: ignore[attr-defined]
    return find_nonfinite([large, small], {large: "large", small: f"expert{half}"})


def test_a_small_mesh_tells_the_ranks_outside_of_it(gloo: ProcessPool) -> None:
    assert gloo.run(_find_on_two_halves, 3) == [["expert1"]] * 4


def test_a_norm_that_overflows_counts_as_non_finite() -> None:
    weight, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    weight.grad, other.grad = torch.full((2,), 2e19), torch.full((2,), 2e19, dtype=torch.float64)
    assert find_nonfinite([weight, other], {weight: "weight", other: "other"}) == ["weight"]


def test_steps_in_a_row_are_counted_until_one_is_taken() -> None:
    check = FiniteCheck(max_skipped_steps=2)
    assert [check.observe(names) for names in (["a"], ["a"], [], ["b"], ["a"])] == [True, True, False, True, True]
    assert check.skipped_steps == 4
    with pytest.raises(NonFiniteGradientError, match=r"gradient of a, b, after 2 skipped steps in a row \(4 in all\)"):
        check.observe(["a", "b"])
    assert check.skipped_steps == 4
