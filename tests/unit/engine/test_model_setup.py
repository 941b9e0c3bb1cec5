"""Memory for meta tensors, and precision policies; with sharding in tests/integration/test_configure_model.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_muon.engine.model_setup import has_meta_tensors, initialize_meta, mixed_precision_policy


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.raw = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_buffer("count", torch.ones(2, dtype=torch.long))


def _materialized(replaced: dict[Tensor, Tensor]) -> tuple[_Net, set[str]]:
    with torch.device("meta"):
        module = _Net()
    return module, initialize_meta(module, torch.device("cpu"), replaced)


def test_ties_gradients_flags_and_persistence_survive() -> None:
    torch.manual_seed(0)
    module, uninitialized = _materialized({})
    assert not has_meta_tensors(module)
    assert module.head.weight is module.embedding.weight
    assert not module.raw.requires_grad
    assert "mask" not in module.state_dict()
    assert "count" in module.state_dict()
    assert uninitialized == {"_Net"}


def test_the_first_holder_of_a_tied_weight_initializes_it() -> None:
    torch.manual_seed(0)
    module, _ = _materialized({})
    assert module.embedding.weight.abs().max() > 1, "normal, not uniform in +- 1/2"


def test_what_cannot_initialize_itself_is_nan() -> None:
    module, _ = _materialized({})
    assert module.raw.isnan().all()
    assert module.mask.isnan().all()
    assert torch.equal(module.norm.running_var, torch.ones(4))


def test_real_tensors_are_left_alone() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    before = module[0].weight.clone()
    initialize_meta(module, torch.device("cpu"), {})
    assert torch.equal(module[0].weight, before)
    assert not has_meta_tensors(module)


def test_ties_between_calls_survive() -> None:
    with torch.device("meta"):
        module = _Net()
    replaced: dict[Tensor, Tensor] = {}
    initialize_meta(module.head, torch.device("cpu"), replaced)
    assert has_meta_tensors(module)
    initialize_meta(module, torch.device("cpu"), replaced)
    assert module.head.weight is module.embedding.weight


def test_mixed_precision_gathers_bfloat16_and_reduces_float32() -> None:
    policy = mixed_precision_policy("bf16-mixed", nn.Linear(2, 2))
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )


def test_batch_norms_are_gathered_in_float32() -> None:
    assert mixed_precision_policy("bf16-mixed", nn.Sequential(nn.BatchNorm2d(3))).param_dtype is None


def test_children_that_are_roots_do_not_cast_their_outputs() -> None:
    module = nn.Linear(2, 2)
    module.automatic_optimization = False  # type: ignore[assignment]
    assert mixed_precision_policy("bf16-mixed", module).output_dtype is None


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_true_precisions_cast_nothing(precision: str) -> None:
    policy = mixed_precision_policy(precision, nn.Linear(2, 2))
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, None, None)
