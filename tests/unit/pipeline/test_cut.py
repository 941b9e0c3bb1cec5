"""Which parts of a model are which stage, and what is left of it on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_muon.pipeline.cut import (
    balance,
    choose_stages,
    matrices_of,
)
from lightning_muon.pipeline.model import find_staged_model
from tests.distributed.pipeline.models import VOCABULARY, WIDTH, causal_lm


class Net(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(4))
        self.head = nn.Linear(4, 100, bias=False)

    def pipeline_parts(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return output.sum(), target.numel()


@given(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.data())
def test_the_stage_with_the_most_work_has_least(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    cuts = [(0, *inner) for inner in combinations(range(1, len(costs)), num_stages - 1)]

    def largest(cut: Sequence[int]) -> int:
        return max(sum(costs[start:end]) for start, end in pairwise([*cut, len(costs)]))

    found = tuple(balance(costs, num_stages))
    assert found in cuts and largest(found) == min(map(largest, cuts))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_head_counts_as_layers_and_an_embedding_not_at_all(kind: str) -> None:
    embedding, *layers, head = (
        sum(p.numel() for p in matrices_of(part)) for part in find_staged_model(causal_lm(kind)).parts
    )
    assert embedding == 0 and head == WIDTH * VOCABULARY and len(set(layers)) == 1
    # The head is as much as five layers.
    model = find_staged_model(causal_lm(kind, num_layers=12, vocabulary=5 * layers[0] // WIDTH))
    assert [len(parts) for parts in choose_stages(model, 3)] == [1 + 5, 6, 1 + 1]
