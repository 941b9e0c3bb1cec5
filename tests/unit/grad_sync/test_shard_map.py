"""Who updates what: owners by cost, rows of the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from lightning_muon.grad_sync.shard_map import place_shards
from lightning_muon.params.layout import OwnedBy


def _tensors(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [torch.empty(shape) for shape in shapes]


def test_matrices_have_owners_and_the_rest_rows() -> None:
    parameters = _tensors([(4, 4), (4,), (), (0, 3), (7, 5), (1, 2)])
    placements = place_shards(
        parameters, {parameters[0]: 100, parameters[2]: 5, parameters[3]: 5, parameters[4]: 90}, 3
    )
    assert list(placements) == parameters
    assert list(placements.values()) == [OwnedBy(0), Shard(0), Replicate(), Replicate(), OwnedBy(1), Shard(0)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_least_loaded_rank_gets_the_dearest_matrix(num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(num_ranks)
    costs = torch.randint(1, 1000, (40,), generator=generator).tolist()
    parameters = _tensors([(2, 2)] * 40)
    placements = place_shards(parameters, dict(zip(parameters, costs, strict=True)), num_ranks)
    loads = [0] * num_ranks
    for parameter, cost in zip(parameters, costs, strict=True):
        placement = placements[parameter]
        assert isinstance(placement, OwnedBy)
        loads[placement.rank] += cost
    # Graham 1969: longest processing time first is within 4/3 - 1/(3 n) of the best, which is at least the mean.
    assert max(loads) <= (4 / 3 - 1 / (3 * num_ranks)) * max(sum(costs) / num_ranks, max(costs))


@pytest.mark.parametrize(
    ("costs", "num_ranks", "expected"), [([5] * 6, 3, [0, 0, 1, 1, 2, 2]), ([10, 100, 20, 30], 2, [0, 1, 1, 1])]
)
def test_equal_costs_take_turns(costs: list[int], num_ranks: int, expected: list[int]) -> None:
    parameters = _tensors([(2, 2)] * len(costs))
    placements = place_shards(parameters, dict(zip(parameters, costs, strict=True)), num_ranks)
    assert sorted(placement.rank for placement in placements.values() if isinstance(placement, OwnedBy)) == expected
