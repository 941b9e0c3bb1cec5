"""FlexDeMo on models sharded by FSDP2 inside of each node, whose ranks see different data."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import DCTTopK, ParallelMuon
from tests.distributed.flexdemo.models import Plan, ShardedNet, make_net, node_gradients
from tests.distributed.flexdemo.setup import assert_close, assert_equal, train
from tests.reference.flexdemo import ReferenceFlexDeMo, Rules
from tests.support.processes import ProcessPool

TOP_K: dict[str, Any] = {"chunk_size": 8, "top_k": 5}
# Several buckets, and nearly all weights compressed.
OPTIONS: dict[str, Any] = {
    "replicator": DCTTopK(**TOP_K), "dense_below": 16, "bucket_bytes": 600, "lr": 0.1, "value_format": "fp32",
    "sign": False, "merge": "mean",
}  # fmt: skip
EXACT_MUON = {"compute_dtype": "float32", "wire_dtype": "float32"}
# float32 against float64, as for drawn gradients; those of a model are smaller, and lr is 0.1.
EXACT = 1e-5
MATRICES = ["first.weight", "convolution.weight", "second.weight", "branch.weight"]


def _reference(plan: Plan) -> ReferenceFlexDeMo:
    """The model in one process and float64, after all steps of ``plan``."""
    (num_nodes, ranks_per_node), options = plan.mesh_shape, plan.options
    shared = {key: options[key] for key in ("lr", "merge", "dense_below", "base", "weight_decay") if key in options}
    rules = Rules(num_nodes=num_nodes, ranks_per_node=ranks_per_node, **shared, **TOP_K)
    model = make_net().double()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = ReferenceFlexDeMo(weights, rules, matrices=MATRICES if "base" in options else ())
    for step in range(plan.num_steps):
        found.step([node_gradients(model, plan, step, node) for node in range(num_nodes)])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(found.weights[name])
    return found


@pytest.mark.parametrize(
    ("mesh_shape", "fields"),
    [
        ((2, 2), {"branch_nodes": (1,), "max_norm": 0.1}),
        ((3, 1), {"micro_batches": 3, "max_norm": 0.1}),
        ((3, 1), {"branch_nodes": (0,)}),
        ((2, 2), {"options": OPTIONS | EXACT_MUON | {"base": "muon", "weight_decay": 0.1}, "num_steps": 2}),
    ],
    ids=str,
)
def test_a_sharded_model_trains_as_the_reference(
    gloo: ProcessPool, mesh_shape: tuple[int, int], fields: dict[str, Any]
) -> None:
    plan = Plan(mesh_shape=mesh_shape, **({"options": OPTIONS} | fields))
    expected = _reference(plan)
    for weights, residuals in gloo.run(train, plan, ShardedNet, world_size=plan.world_size):
        assert_close(weights, expected.weights, EXACT)
        for node in range(mesh_shape[0]):
            found = {name: residual[node] for name, residual in residuals.items()}
            assert_close(found, {name: expected.residual(name, node) for name in found}, EXACT)


def _base(model: nn.Module, base: str) -> torch.optim.Optimizer:
    """The optimizer that FlexDeMo claims to be."""
    if base == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01)
    if base == "adamw":
        group = {"params": list(model.named_parameters()), "algorithm": "adamw"}
        return ParallelMuon([group], lr=0.01, weight_decay=0.1)
    return ParallelMuon(model, lr=0.01, weight_decay=0.1, momentum=0.0, nesterov=False, **EXACT_MUON)


def _one_node_model(mesh_shape: tuple[int, int], base: str) -> tuple[dict[str, Tensor], ...]:
    """Weights of FlexDeMo and of its base, with accumulation and clipping."""
    options = {"base": base, "weight_decay": 0.0 if base == "sgd" else 0.1, "sign": False}
    options |= EXACT_MUON if base == "muon" else {}
    plan = Plan(mesh_shape=mesh_shape, options=options, micro_batches=2, max_norm=0.5)
    results = []
    for is_base in (False, True):
        ranks = ShardedNet(plan)
        if is_base:
            ranks.optimizer = _base(ranks.model, base)  # type: ignore[assignment]
        ranks.train()
        results.append(ranks.weights())
    return tuple(results)


@pytest.mark.parametrize("base", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("mesh_shape", [(1, 2), (1, 3)], ids=str)
def test_one_node_is_fsdp_and_the_base_for_a_model(gloo: ProcessPool, mesh_shape: tuple[int, int], base: str) -> None:
    for found, expected in gloo.run(_one_node_model, mesh_shape, base, world_size=mesh_shape[0] * mesh_shape[1]):
        assert_equal(found, expected)


def _drift(name: str) -> None:
    """Two rows of a weight change places on the second node."""
    ranks = ShardedNet(Plan(mesh_shape=(2, 2), options=OPTIONS | {"check_every": 2}))
    for step in range(4):
        ranks.set_gradients(step)
        if step == 1 and ranks.node == 1 and ranks.shard_rank == 0:
            weight = ranks.parameters[name].detach().to_local()  # type: ignore[attr-defined]
            weight.copy_(weight.flip(0))
        ranks.optimizer.step()


def test_a_weight_changed_on_one_node_is_named_on_all_ranks(gloo: ProcessPool) -> None:
    for name in ("second.weight", "frozen.weight"):
        gloo.expect_error_on_all_ranks(_drift, name, match=name, exception=RuntimeError, world_size=4)
