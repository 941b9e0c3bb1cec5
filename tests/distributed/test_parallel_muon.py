"""ParallelMuon: groups with options of their own, and dtypes of arithmetic and wire."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_muon import ParallelMuon
from tests.distributed.sharding.training import distributed_over
from tests.support import family
from tests.support.processes import ProcessPool
from tests.support.tensors import whole

Options = dict[str, Any]


def _train(mesh_shape: tuple[int, ...], dtype: str, groups: list[Options]) -> list[Tensor]:
    """Equal weights and gradients in groups with other options; small, so that Newton-Schulz runs on batches."""
    place, (first, *grads) = distributed_over(mesh_shape, 0), torch.randn(4, 33, 40, generator=torch.Generator())
    parameters = [nn.Parameter(place(first)) for _ in groups]
    named = [{"params": [each], **options} for each, options in zip(parameters, groups, strict=True)]
    optimizer = ParallelMuon(named, lr=0.02, algorithm="muon", compute_dtype=dtype)
    for grad in grads:
        for parameter in parameters:
            parameter.grad = place(grad)
        optimizer.step()
    return [whole(parameter) for parameter in parameters]


def test_groups_with_other_options_share_no_batch(gloo: ProcessPool) -> None:
    eq, plus = {"orthogonalize": family.muon_eq}, {"orthogonalize": family.muon_plus}
    groups: list[Options] = [{}, eq, plus, eq, {}]
    together = gloo.run(_train, (2,), "float32", groups, world_size=2)
    for options, *found in zip(groups, *together, strict=True):
        (expected,) = gloo.run(_train, (1,), "float32", [options], world_size=1)[0]
        assert all(torch.equal(each, expected) for each in found)
    assert len({float(each.sum()) for each in together[0]}) == 3


def test_bfloat16_compute_loses_nothing_on_a_bfloat16_wire(gloo: ProcessPool) -> None:
    # Newton-Schulz rounds its input to bfloat16 and gives bfloat16 back, so the wire rounds nothing more: exact.
    (expected,) = gloo.run(_train, (1,), "bfloat16", [{}], world_size=1)[0]
    assert all(torch.equal(found, expected) for (found,) in gloo.run(_train, (4,), "bfloat16", [{}], world_size=4))
