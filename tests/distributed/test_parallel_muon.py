"""ParallelMuon: groups with options of their own, and dtypes of arithmetic and wire."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_muon import ParallelMuon
from tests.distributed.sharding.training import distributed_over
from tests.support import family
from tests.support.processes import ProcessPool
from tests.support.tensors import SHAPES as ALL_SHAPES
from tests.support.tensors import random_tensors, whole, wholes

_OTHERS = ("column", "queries", "heads", "bias", "scalar")
SHAPES = {name: shape for name, shape in ALL_SHAPES.items() if name not in _OTHERS}
NUM_STEPS = 3
LR = 0.02
Options = dict[str, object]


def _train(place: Callable[[Tensor], Tensor], **options: object) -> dict[str, Tensor]:
    """Weights after ``NUM_STEPS`` of ParallelMuon with gradients drawn from a seed that is equal on all ranks."""
    parameters = {name: nn.Parameter(place(tensor)) for name, tensor in random_tensors(SHAPES, 0).items()}
    optimizer = ParallelMuon(parameters.items(), lr=LR, algorithm="muon", **options)  # type: ignore[arg-type]
    for step in range(NUM_STEPS):
        for name, grad in random_tensors(SHAPES, 1 + step).items():
            parameters[name].grad = place(grad)
        optimizer.step()
    return wholes(parameters)


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


def _train_shards() -> dict[str, Tensor]:
    return _train(distributed_over((4,), 0), compute_dtype="bfloat16")


def test_bfloat16_compute_loses_nothing_on_a_bfloat16_wire(gloo: ProcessPool) -> None:
    # Newton-Schulz rounds its input to bfloat16 and gives bfloat16 back, so the wire rounds nothing more: exact.
    single = _train(lambda tensor: tensor.clone(), compute_dtype="bfloat16")
    for result in gloo.run(_train_shards, world_size=4):
        assert all(torch.equal(result[name], single[name]) for name in single)
