"""States of nodes that another number of nodes loads; whole runs are in tests/integration/test_flexdemo.py."""

from __future__ import annotations

import pytest
import torch

from lightning_muon.flexdemo.node_state import Rule
from lightning_muon.integrations.node_states import expect_saved_nodes, share_whole

_RULES: dict[str, Rule] = {"residual": "sum", "node_weights": "mean"}


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_what_was_not_sent_keeps_its_sum_and_weights_their_mean(num_nodes: int) -> None:
    residual, weights = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    saved = {"layer": {"residual": residual, "node_weights": weights, "exp_avg": torch.ones(4, 5)}}
    own = {"layer": {"residual": torch.zeros(num_nodes, 4, 5), "node_weights": torch.zeros(num_nodes, 4, 5)}}
    found = share_whole(saved, own, _RULES)["layer"]
    torch.testing.assert_close(found["residual"].double().sum(0), residual.double().sum(0), rtol=1e-5, atol=1e-6)
    for node in range(num_nodes):
        assert torch.equal(found["residual"][node], found["residual"][0])
        torch.testing.assert_close(found["node_weights"][node], weights.mean(0), rtol=1e-5, atol=1e-6)
    assert found["exp_avg"] is saved["layer"]["exp_avg"]
    assert saved["layer"]["residual"] is residual, "what was read is not changed"


def test_as_many_nodes_get_their_own_back() -> None:
    residual = torch.randn(3, 4)
    found = share_whole({"layer": {"residual": residual}}, {"layer": {"residual": torch.zeros(3, 4)}}, _RULES)
    assert found["layer"]["residual"] is residual


def test_shares_keep_the_dtype_of_weights_and_add_up_in_float32() -> None:
    weights = torch.full((256, 2), 1.0, dtype=torch.bfloat16)  # A sum in bfloat16 would stop at 256.
    weights[0] = 9.0
    own = {"a": {"residual": torch.zeros(1, 2)}}
    found = share_whole({"a": {"residual": weights}}, own, _RULES)["a"]["residual"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.full((1, 2), 264.0, dtype=torch.bfloat16))


def test_tensors_of_the_saved_size_are_loaded_and_shared_afterwards() -> None:
    own = torch.zeros(1, 4)
    states = {"a": {"residual": own, "exp_avg": torch.ones(4)}, "b": {"residual": torch.ones(3, 4)}, "c": {}}
    kept = states["b"]["residual"]
    share = expect_saved_nodes(states, lambda name, entry: (3, 4), _RULES)
    assert states["a"]["residual"].shape == (3, 4)
    assert states["b"]["residual"] is kept
    loaded = torch.randn(3, 4)
    states["a"]["residual"].copy_(loaded)
    share()
    torch.testing.assert_close(states["a"]["residual"], loaded.sum(0, keepdim=True))
    assert states["c"] == {}
