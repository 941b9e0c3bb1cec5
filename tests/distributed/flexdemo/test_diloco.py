"""DiLoCo on several nodes against a naive run of all nodes in one process."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon import DiLoCo
from tests.distributed.flexdemo.setup import MATRICES, Case, Ranks, assert_close
from tests.support.processes import ProcessPool
from tests.support.tensors import wholes

LR = 0.05


def _case(mesh_shape: tuple[int, int], replicator: Any, num_steps: int = 8) -> Case:
    # Several messages for each average.
    options = {"lr": LR, "replicator": replicator, "sign": False, "bucket_bytes": 3000}
    return Case(mesh_shape=mesh_shape, options=options, num_steps=num_steps)


def _weights(ranks: Ranks) -> dict[str, Tensor]:
    """Whole weights of the node, as they are now: with one rank, a full tensor shares memory."""
    return {name: weight.clone() for name, weight in ranks.weights().items()}


# Muon inside of a node (MuLoCo): momentum, AdamW for the rest, weight decay, and both outlive the averages.
INNER: dict[str, Any] = {
    "base": "muon", "weight_decay": 0.1, "compute_dtype": "float32", "wire_dtype": "float32", "check_every": 1,
}  # fmt: skip


def _saved_whole(case: Case) -> dict[str, Any]:
    ranks = Ranks(case)
    ranks.train(agree=False)
    state = ranks.optimizer.state_dict()
    tensors = {
        number: {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in entry.items()}
        for number, entry in state["state"].items()
    }
    return {"state": tensors, "param_groups": state["param_groups"]}


def _loaded(case: Case, state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Weights after loading, the outer momentum, and that of Muon in this node; then it trains on."""
    ranks = Ranks(case)
    ranks.optimizer.load_state_dict(deepcopy(state))
    states = ranks.optimizer.state
    weights = _weights(ranks)
    momentum = wholes({name: states[parameter]["outer_momentum"] for name, parameter in ranks.parameters.items()})
    inner = wholes({name: states[ranks.parameters[name]]["momentum_buffer"] for name in MATRICES})
    ranks.train(range(case.num_steps, case.num_steps + 3), agree=False)
    assert ranks.optimizer.num_exchanges == case.num_steps + 3
    return weights, momentum, inner


@pytest.mark.parametrize(("before", "after"), [((4, 1), (2, 2)), ((2, 1), (3, 1)), ((2, 2), (2, 1))], ids=str)
def test_another_number_of_nodes_goes_on_from_the_mean(
    gloo: ProcessPool, before: tuple[int, int], after: tuple[int, int]
) -> None:
    case = _case(before, DiLoCo(period=3), num_steps=4)
    case = replace(case, options=case.options | INNER)
    state = gloo.run(_saved_whole, case, world_size=case.world_size)[0]
    case = replace(case, mesh_shape=after)
    results = gloo.run(_loaded, case, state, world_size=case.world_size)
    for rank, (weights, momentum, inner) in enumerate(results):
        for number, name in enumerate(case.shapes):
            saved = state["state"][number]
            for key, found in (("node_weights", weights), ("momentum_buffer", inner)):
                if name in found:
                    of_nodes = saved[key]
                    assert of_nodes.shape[0] == before[0]
                    assert not torch.equal(of_nodes[0], of_nodes[1])
                    is_kept = after[0] == before[0]
                    expected = of_nodes[rank // after[1]] if is_kept else of_nodes.double().mean(0)
                    assert_close({name: found[name]}, {name: expected}, 0 if is_kept else 1e-6)
            assert torch.equal(momentum[name], saved["outer_momentum"])
