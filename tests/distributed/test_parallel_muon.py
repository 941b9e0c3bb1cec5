"""ParallelMuon on 1 to 4 ranks against Muon on full matrices in one process."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import ParallelMuon
from lightning_muon.math.coefficients import FAST, steps_of
from tests.distributed.sharding.training import distributed_over, mesh_of
from tests.reference import muon
from tests.reference.muon import ReferenceMuon
from tests.support import family
from tests.support.processes import ProcessPool
from tests.support.tensors import random_tensors, whole, wholes

# Odd sizes: rows that do not divide, fewer rows than ranks, tall, flat, a stack of experts, a convolution.
SHAPES = {
    "odd": (13, 7),
    "square": (64, 64),
    "flat": (3, 200),
    "row": (1, 9),
    "tall": (200, 3),
    "stack": (3, 10, 6),
    "stack_of_one": (1, 12, 5),
    "convolution": (6, 4, 3, 3),
}
MESHES = [(1,), (2,), (3,), (4,), (1, 4), (2, 2), (3, 1), (1, 1)]
NUM_STEPS = 3
LR = 0.02
Options = dict[str, object]
# fp32 wire and compute: the arithmetic is the reference's, in the same order, on any number of ranks.
EXACT = 1e-6


def _train(place: Callable[[Tensor], Tensor], **options: object) -> dict[str, Tensor]:
    """Weights after ``NUM_STEPS`` of ParallelMuon with gradients drawn from a seed that is equal on all ranks."""
    parameters = {name: nn.Parameter(place(tensor)) for name, tensor in random_tensors(SHAPES, 0).items()}
    optimizer = ParallelMuon(parameters.items(), lr=LR, algorithm="muon", **options)  # type: ignore[arg-type]
    for step in range(NUM_STEPS):
        for name, grad in random_tensors(SHAPES, 1 + step).items():
            parameters[name].grad = place(grad)
        optimizer.step()
    return wholes(parameters)


def _train_each(mesh_shape: tuple[int, ...], cases: list[tuple[int | str | None, Options]]) -> list[dict[str, Tensor]]:
    """One training after the other, of tensors that are sharded along a dimension, replicated (None), or "plain"."""
    mesh = mesh_of(mesh_shape)
    return [
        _train(torch.clone, mesh=mesh, **options)
        if dim == "plain"
        else _train(distributed_over(mesh_shape, dim), **options)
        for dim, options in cases
    ]


def _reference(dtype: torch.dtype = torch.float32, **options: object) -> dict[str, Tensor]:
    reference = ReferenceMuon(random_tensors(SHAPES, 0), lr=LR, dtype=dtype, **options)  # type: ignore[arg-type]
    for step in range(NUM_STEPS):
        reference.step(random_tensors(SHAPES, 1 + step))
    return reference.matrices


def _largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


# Dimension of shards and options of ParallelMuon; what is expected, and how far from it weights may be.
Case = tuple[int | str | None, Options, dict[str, Tensor], float]
FLOAT32: Options = {"compute_dtype": "float32", "wire_dtype": "float32"}


def _compare(
    gloo: ProcessPool,
    mesh_shape: tuple[int, ...],
    cases: list[Case],
    cut: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> None:
    """All ranks, in one call of the pool."""
    trainings = [(dim, FLOAT32 | options) for dim, options, *_ in cases]
    for results in gloo.run(_train_each, mesh_shape, trainings, world_size=math.prod(mesh_shape)):
        for result, (dim, options, expected, tolerance) in zip(results, cases, strict=True):
            assert _largest_difference(cut(result), expected) <= tolerance, (dim, options)


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_shards_give_the_weights_of_full_matrices(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    options, expected = {"bucket_bytes": 8000, "muon_lr_factor": 2.5}, _reference(muon_lr_factor=2.5)
    _compare(gloo, mesh_shape, [(dim, options, expected, EXACT) for dim in (0, 1)])


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)], ids=str)
def test_replicas_divide_the_work_and_agree(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    expected = _reference()
    _compare(gloo, mesh_shape, [(kind, {}, expected, EXACT) for kind in (None, "plain")])


def test_hyper_parameters_mean_what_they_mean_in_one_process(gloo: ProcessPool) -> None:
    every: list[Options] = [
        {"nesterov": False},
        {"adjust_lr_fn": "original"},
        {"momentum": 0.5, "weight_decay": 0.0},
    ]
    _compare(gloo, (3,), [(0, options, _reference(**options), EXACT) for options in every])


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_each_preset_and_quality_is_that_of_full_matrices(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    # Gram iterations, which "fast" takes for unequal sides, add in another order; each step is off by some 1e-6.
    custom = tuple((3.0 - 0.2 * step, -3.0, 1.1) for step in range(4))
    cubic = ((1.5, -0.5, 0.0),) * 5
    qualities: list[tuple[Options, Any, float]] = [
        ({"ns_coefficients": "polar_express", "ns_steps": 6}, steps_of("polar_express", 6), EXACT),
        ({"ns_coefficients": cubic[0]}, cubic, EXACT),
        ({"ns_coefficients": custom, "ns_steps": 4}, custom, EXACT),
        ({"ns_quality": "fast"}, FAST, 50 * EXACT),
    ]
    first = 0 if mesh_shape == (3,) else 2
    _compare(
        gloo, mesh_shape, [(0, options, _reference(steps=steps), limit) for options, steps, limit in qualities[first:]]
    )


@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (2, 2)], ids=str)
def test_cautious_decay_is_that_of_full_matrices(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    # So large a decay that each element of the wrong sign would show.
    options: Options = {"cautious_weight_decay": True, "weight_decay": 5.0}
    expected = _reference(**options)
    assert _largest_difference(expected, _reference(weight_decay=5.0)) > 0.1
    _compare(gloo, mesh_shape, [(0, options, expected, EXACT)])


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
def test_a_function_gets_whole_matrices(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    functions: list[tuple[Any, Any, Options]] = [
        (family.muon_eq, muon.muon_eq, {}),
        (family.muon_plus, muon.muon_plus, {}),
        (family.muon_plus, muon.muon_plus, {"nesterov": False, "cautious_weight_decay": True, "normuon": True}),
    ]
    # Lengths are float64 in the reference; Newton-Schulz multiplies the rounding of small singular values by up to 500.
    cases: list[Case] = [
        (1, {"orthogonalize": ours, **more}, _reference(orthogonalization=same, **more), 20 * EXACT)
        for ours, same, more in functions[: 3 if mesh_shape == (3,) else 2]
    ]
    _compare(gloo, mesh_shape, cases)


def _train_groups(mesh_shape: tuple[int, ...], groups: list[Options]) -> list[Tensor]:
    """Equal weights and gradients in groups with other options; small, so that Newton-Schulz runs on batches."""
    place, (first, *grads) = distributed_over(mesh_shape, 0), torch.randn(4, 33, 40, generator=torch.Generator())
    parameters = [nn.Parameter(place(first)) for _ in groups]
    named = [{"params": [each], **options} for each, options in zip(parameters, groups, strict=True)]
    optimizer = ParallelMuon(named, lr=LR, algorithm="muon", compute_dtype="float32")
    for grad in grads:
        for parameter in parameters:
            parameter.grad = place(grad)
        optimizer.step()
    return [whole(parameter) for parameter in parameters]


def test_groups_with_other_options_share_no_batch(gloo: ProcessPool) -> None:
    eq, plus = {"orthogonalize": family.muon_eq}, {"orthogonalize": family.muon_plus}
    groups: list[Options] = [{}, eq, plus, eq, {}]
    together = gloo.run(_train_groups, (2,), groups, world_size=2)
    for options, *found in zip(groups, *together, strict=True):
        (expected,) = gloo.run(_train_groups, (1,), [options], world_size=1)[0]
        assert all(torch.equal(each, expected) for each in found)
    assert len({float(each.sum()) for each in together[0]}) == 3


# Dimension and sizes of parts, as heads of queries, keys and values have them.
_PARTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "square": (0, (16, 40, 8)),
    "odd": (1, (3, 4)),
    "tall": (1, (1, 1, 1)),
    "convolution": (1, (2, 2)),
}


def _cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts as tensors of their own."""
    cut: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        dim, sizes = _PARTS.get(name, (0, (tensor.shape[0],)))
        cut |= {f"{name} {index}": part for index, part in enumerate(tensor.split(sizes, dim))}
    return cut


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (2, 2)], ids=str)
def test_parts_along_both_sides_are_matrices(gloo: ProcessPool, mesh_shape: tuple[int, ...]) -> None:
    # Of the rows and columns of each part.
    reference = ReferenceMuon(_cut(random_tensors(SHAPES, 0)), lr=LR, orthogonalization=muon.muon_plus)
    for step in range(NUM_STEPS):
        reference.step(_cut(random_tensors(SHAPES, 1 + step)))
    parts = {"fused": {"square": (16, 40, 8)}, "fused_inputs": {"odd": (3, 4), "tall": 3, "convolution": 2}}
    chosen = parts | {"orthogonalize": family.muon_plus}
    _compare(gloo, mesh_shape, [(dim, chosen, reference.matrices, 20 * EXACT) for dim in (0, 1)], _cut)


def test_bfloat16_compute_loses_nothing_on_a_bfloat16_wire(gloo: ProcessPool) -> None:
    # Newton-Schulz rounds its input to bfloat16 and gives bfloat16 back, so the wire rounds nothing more: exact.
    single = _train(lambda tensor: tensor.clone(), compute_dtype="bfloat16")
    for (result,) in gloo.run(_train_each, (4,), [(0, {"compute_dtype": "bfloat16"})], world_size=4):
        assert all(torch.equal(result[name], single[name]) for name in single)


def test_a_bfloat16_wire_stays_within_rounding(gloo: ProcessPool) -> None:
    # Input and update of Newton-Schulz are rounded to 8 bits (relative 2^-9); an update has entries of about 0.2 after
    # the scale of match_rms_adamw, so a step of lr 0.02 is off by about 0.02 * 0.2 * 2^-9 = 8e-6 for each rounding of
    # the update, more for the input, where small singular values are amplified. Ten steps measured: 2.3e-4.
    options: Options = {"compute_dtype": "float32", "wire_dtype": "bfloat16"}
    for (found,) in gloo.run(_train_each, (4,), [(0, options)], world_size=4):
        assert 0 < _largest_difference(found, _reference()) <= 1e-3
