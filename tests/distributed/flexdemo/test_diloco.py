"""DiLoCo on several nodes against a naive run of all nodes in one process."""

from copy import deepcopy
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_muon import DiLoCo, NoReplication
from tests.distributed.flexdemo.setup import MATRICES, Case, Ranks, assert_close, assert_equal
from tests.reference.diloco import ReferenceDiLoCo, Rules
from tests.support.processes import ProcessPool
from tests.support.tensors import wholes

LR = 0.05
MESHES = [(2, 1), (2, 2), (3, 1)]
LOCAL_SGD = DiLoCo(period=2, outer_lr=1.0, outer_momentum=0.0, nesterov=False)
OPTIONS = [
    DiLoCo(period=3),
    DiLoCo(period=2, nesterov=False, outer_lr=0.5, outer_momentum=0.6),
    LOCAL_SGD,
    replace(LOCAL_SGD, period=1),
]


def _case(mesh_shape: tuple[int, int], replicator: Any, num_steps: int = 8) -> Case:
    # Several messages for each average.
    options = {"lr": LR, "replicator": replicator, "sign": False, "bucket_bytes": 3000}
    return Case(mesh_shape=mesh_shape, options=options, num_steps=num_steps)


def _reference(case: Case) -> ReferenceDiLoCo:
    """All nodes in one process and float64, after the steps of ``case``."""
    options, outer = case.options, case.options["replicator"]
    shared = {key: options[key] for key in ("lr", "weight_decay", "base", "momentum") if key in options}
    inner = {"inner_nesterov": options.get("nesterov", True), "matrices": MATRICES}
    found = ReferenceDiLoCo(case.weights(), Rules(num_nodes=case.mesh_shape[0], **vars(outer), **shared, **inner))
    for step in range(case.num_steps):
        found.step([case.gradients(step, node) for node in range(case.mesh_shape[0])])
    return found


def _weights(ranks: Ranks) -> dict[str, Tensor]:
    """Whole weights of the node, as they are now: with one rank, a full tensor shares memory."""
    return {name: weight.clone() for name, weight in ranks.weights().items()}


def _train(case: Case) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    """Node of the calling rank, its weights at the end, and the common ones."""
    ranks = Ranks(case)
    options = case.options["replicator"]
    for step in range(case.num_steps):
        ranks.train([step], agree=False)
        if (step + 1) % options.period == 0:
            ranks.check_nodes_agree()
    weights = _weights(ranks)
    with ranks.optimizer.common_weights():
        ranks.check_nodes_agree()
        common = _weights(ranks)
    assert_equal(_weights(ranks), weights)
    return ranks.node, weights, common


# Muon inside of a node (MuLoCo): momentum, AdamW for the rest, weight decay, and both outlive the averages.
INNER: dict[str, Any] = {
    "base": "muon", "weight_decay": 0.1, "compute_dtype": "float32", "wire_dtype": "float32", "check_every": 1,
}  # fmt: skip
PLAIN = {"momentum": 0.6, "nesterov": False}
MUON = DiLoCo(period=3, outer_lr=0.9, outer_momentum=0.8)
MISSING: dict[str, Any] = {"missing": {0: ["prime", "bias"]}, "missing_from": 3}


@pytest.mark.parametrize(
    ("mesh_shape", "replicator", "options", "fields"),
    [
        *((mesh_shape, replicator, {}, {}) for mesh_shape, replicator in zip(cycle(MESHES), OPTIONS, strict=False)),
        ((2, 2), OPTIONS[0], {}, {}),
        ((1, 1), MUON, INNER, {}),
        ((1, 2), MUON, INNER | PLAIN, {}),
        ((2, 2), MUON, INNER, MISSING),
        ((3, 1), MUON, INNER | PLAIN, MISSING),
    ],
    ids=str,
)
def test_nodes_follow_a_naive_run_of_all_of_them(
    gloo: ProcessPool, mesh_shape: tuple[int, int], replicator: DiLoCo, options: dict[str, Any], fields: dict[str, Any]
) -> None:
    case = _case(mesh_shape, replicator)
    case = replace(case, options=case.options | options, **fields)
    expected = _reference(case)
    for node, weights, found in gloo.run(_train, case, world_size=case.world_size):
        # float32 against float64: some roundings of weights of size 5.
        assert_close(weights, expected.nodes[node], 1e-5)
        assert_close(found, expected.common, 1e-5)


def _by_themselves(case: Case) -> tuple[int, dict[str, Tensor]]:
    ranks = Ranks(case)
    ranks.train(agree=False)
    return ranks.node, _weights(ranks)


@pytest.mark.parametrize("base", ["sgd", "adamw"])
def test_without_replication_every_node_is_alone(gloo: ProcessPool, base: str) -> None:
    case = _case((2, 2), NoReplication(), num_steps=3)
    case = replace(case, options=case.options | {"base": base, "check_every": 1})
    # Averages that never come.
    expected = _reference(replace(case, options=case.options | {"replicator": DiLoCo(period=100)}))
    for node, weights in gloo.run(_by_themselves, case, world_size=4):
        assert_close(weights, expected.nodes[node], 1e-6)


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
