"""Memory for meta tensors, and precision policies; with sharding in tests/integration/test_configure_model.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_muon.engine.model_setup import has_meta_tensors, initialize_meta


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.raw = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_buffer("count", torch.ones(2, dtype=torch.long))


def test_ties_flags_persistence_and_values_are_right() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        module = _Net()
    before = module.state_dict().keys()
    assert initialize_meta(module, torch.device("cpu"), {}) == {"_Net"}
    assert not has_meta_tensors(module) and module.state_dict().keys() == before
    assert module.head.weight is module.embedding.weight and not module.raw.requires_grad
    assert module.embedding.weight.abs().max() > 1, "normal, as its first holder makes it, not uniform in +- 1/2"
    assert module.raw.isnan().all() and module.mask.isnan().all(), "what cannot initialize itself"
    assert torch.equal(module.norm.running_var, torch.ones(4))


def test_real_tensors_are_left_alone() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    before = module[0].weight.clone()
    initialize_meta(module, torch.device("cpu"), {})
    assert torch.equal(module[0].weight, before) and not has_meta_tensors(module)


def test_ties_between_calls_survive() -> None:
    with torch.device("meta"):
        module = _Net()
    replaced: dict[Tensor, Tensor] = {}
    initialize_meta(module.head, torch.device("cpu"), replaced)
    assert has_meta_tensors(module)
    initialize_meta(module, torch.device("cpu"), replaced)
    assert module.head.weight is module.embedding.weight
