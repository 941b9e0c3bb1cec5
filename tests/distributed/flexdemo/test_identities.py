"""What FlexDeMo is where nothing is left out: the base optimizer, with one node, or with the mean over all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import DCTTopK, Full, ParallelMuon, Replicator
from tests.distributed.flexdemo.models import Plan, ShardedNet, make_net, node_gradients
from tests.distributed.flexdemo.setup import assert_close, assert_equal
from tests.support.processes import ProcessPool

ALL = DCTTopK(chunk_size=8, top_k=64)
FLOAT32 = {"compute_dtype": "float32", "wire_dtype": "float32"}


def _base(parameters: Any, base: str, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """The optimizer that FlexDeMo claims to be."""
    if base == "sgd":
        parameters = parameters.parameters() if isinstance(parameters, nn.Module) else [p for _, p in parameters]
        return torch.optim.SGD(parameters, lr=lr)
    if base == "adamw":
        groups = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
        return ParallelMuon([{"params": list(groups), "algorithm": "adamw"}], lr=lr, weight_decay=weight_decay)
    return ParallelMuon(parameters, lr=lr, weight_decay=weight_decay, momentum=0.0, nesterov=False, **FLOAT32)


def _one_node_model(mesh_shape: tuple[int, int], base: str) -> tuple[dict[str, Tensor], ...]:
    """The same with a model of FSDP2, accumulation and clipping."""
    weight_decay = 0.0 if base == "sgd" else 0.1
    options = {"base": base, "weight_decay": weight_decay, "sign": False} | (FLOAT32 if base == "muon" else {})
    plan = Plan(mesh_shape=mesh_shape, options=options, micro_batches=2, max_norm=0.5)
    results = []
    for is_base in (False, True):
        ranks = ShardedNet(plan)
        if is_base:
            ranks.optimizer = _base(ranks.model, base, 0.01, weight_decay)  # type: ignore[assignment]
        ranks.train()
        results.append(ranks.weights())
    return tuple(results)


@pytest.mark.parametrize("base", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("mesh_shape", [(1, 2), (1, 3)], ids=str)
def test_one_node_is_fsdp_and_the_base_for_a_model(gloo: ProcessPool, mesh_shape: tuple[int, int], base: str) -> None:
    for found, expected in gloo.run(_one_node_model, mesh_shape, base, world_size=mesh_shape[0] * mesh_shape[1]):
        assert_equal(found, expected)


def _data_parallel(num_nodes: int, base: str) -> dict[str, Tensor]:
    """One process, the base, and the mean of all nodes' gradients: what DDP gives."""
    model = make_net()
    plan = Plan(mesh_shape=(num_nodes, 1))
    if base == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    else:
        optimizer = _base(model, base, 0.01, 0.0 if base == "sgd" else 0.1)
    for step in range(plan.num_steps):
        nodes = [node_gradients(model, plan, step, node) for node in range(num_nodes)]
        for name, parameter in model.named_parameters():
            grads = [node[name] for node in nodes if name in node]
            parameter.grad = torch.stack(grads).sum(0) / num_nodes if grads else None
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _all_coefficients(num_nodes: int, options: dict[str, Any]) -> dict[str, Tensor]:
    ranks = ShardedNet(Plan(mesh_shape=(num_nodes, 1), options=options))
    ranks.train()
    return ranks.weights()


@pytest.mark.parametrize(
    ("num_nodes", "base", "replicator"),
    [(num_nodes, base, each) for base in ("sgd", "adamw", "muon") for num_nodes, each in ((2, ALL), (3, Full()))],
)
def test_all_coefficients_without_decay_are_ddp_and_the_base(
    gloo: ProcessPool, num_nodes: int, base: str, replicator: Replicator
) -> None:
    options = {"base": base, "replicator": replicator, "decay": 0.0, "merge": "mean", "value_format": "fp32"}
    options |= {"sign": False, "dense_below": 16, "weight_decay": 0.0 if base == "sgd" else 0.1}
    options |= FLOAT32 if base == "muon" else {}
    expected = _data_parallel(num_nodes, base)
    # A transform there and back is off by some 2^-23 of the update, which lr = 0.01 multiplies. AdamW divides by the
    # root of the second moment: where a gradient is near its eps of 1e-8 a step can be off by much of lr.
    tolerance = 1e-6
    for found in gloo.run(_all_coefficients, num_nodes, options, world_size=num_nodes):
        assert_close(found, expected, tolerance)
