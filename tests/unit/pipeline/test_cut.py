"""Which parts of a model are which stage, and what is left of it on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_muon.pipeline.cut import (
    balance,
    choose_stages,
    matrices_of,
    untie,
)
from lightning_muon.pipeline.model import StagedModel, find_staged_model
from tests.distributed.pipeline.models import VOCABULARY, WIDTH, causal_lm


class Net(nn.Module):
    """Linear layers of these widths between an embedding and a head that may share its weight."""

    def __init__(self, inner: Sequence[int] = (4, 4, 4, 4), *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, each), nn.Linear(each, 4)) for each in inner)
        self.head = nn.Linear(4, 100, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def pipeline_parts(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def pipeline_loss(self, output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return output.sum(), target.numel()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _names(stages: Sequence[Sequence[object]]) -> list[list[str]]:
    return [[part.name for part in parts] for parts in stages]  # type: ignore[attr-defined]


def _model(net: nn.Module) -> StagedModel:
    return find_staged_model(net)


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
    embedding, *layers, head = (sum(p.numel() for p in matrices_of(part)) for part in _model(causal_lm(kind)).parts)
    assert embedding == 0 and head == WIDTH * VOCABULARY and len(set(layers)) == 1
    # The head is as much as five layers.
    model = _model(causal_lm(kind, num_layers=12, vocabulary=5 * layers[0] // WIDTH))
    assert [len(parts) for parts in choose_stages(model, 3)] == [1 + 5, 6, 1 + 1]


def test_first_parts_say_where_stages_begin() -> None:
    stages = choose_stages(_model(Net()), 3, ["embedding", "blocks.1", "head"])
    assert _names(stages) == [["embedding", "blocks.0"], ["blocks.1", "blocks.2", "blocks.3"], ["head"]]


def test_parts_that_share_a_parameter_get_copies() -> None:
    net = Net(tied=True)
    net.embedding.weight.requires_grad_(False)
    first = net.embedding.weight
    net.blocks[1][0].weight = net.blocks[0][0].weight
    net.blocks[2][1].weight = net.blocks[2][0].weight  # Twice in one part: stays one parameter.
    stages = choose_stages(_model(net), 3, ["embedding", "blocks.1", "head"])
    assert [{stage: name for stage, (*_, name) in places.items()} for places in untie(net, stages)] == [
        {0: "embedding.weight", 2: "head.weight"},
        {0: "blocks.0.0.weight", 1: "blocks.1.0.weight"},
    ]
    assert net.embedding.weight is first and net.head.weight is not first
    assert torch.equal(net.head.weight, first) and not net.head.weight.requires_grad
    assert net.blocks[1][0].weight is not net.blocks[0][0].weight and net.blocks[1][0].weight.requires_grad
    assert net.blocks[2][1].weight is net.blocks[2][0].weight
    assert untie(net, stages) == []
