"""Layers that ranks cannot share are refused by name."""

import pytest
from torch import nn

from lightning_muon.sharding.shard_model import check_layers


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        (nn.LazyLinear(3), r"^body\.0 \(LazyLinear\) does not know the shape of its weights yet"),
        (nn.Embedding(5, 3, sparse=True), r"^body\.0 \(Embedding\) has sparse gradients"),
        (nn.EmbeddingBag(5, 3, mode="sum", sparse=True), r"^body\.0 \(EmbeddingBag\) has sparse gradients"),
    ],
)
def test_a_layer_that_ranks_cannot_share_is_refused(layer: nn.Module, problem: str) -> None:
    model = nn.ModuleDict({"body": nn.Sequential(layer)})
    with pytest.raises(ValueError, match=problem):
        check_layers(model)
    if not isinstance(layer, nn.LazyLinear):
        check_layers(model.requires_grad_(False))
