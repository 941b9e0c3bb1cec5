"""FlexDeMo on models sharded by FSDP2 inside of each node, whose backward launches the exchange."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_muon import DCTTopK, ParallelMuon, Random
from tests.distributed.flexdemo.models import Plan, ShardedNet, reference
from tests.distributed.flexdemo.setup import assert_close, assert_equal, local, train, train_all
from tests.reference.flexdemo import Rules
from tests.support.processes import ProcessPool
from tests.support.recorded_ops import recorded_ops

TOP_K: dict[str, Any] = {"chunk_size": 8, "top_k": 5}
# Several buffers, and nearly all weights compressed.
OPTIONS: dict[str, Any] = {"replicator": DCTTopK(**TOP_K), "dense_below": 16, "chunk_bytes": 600, "lr": 0.1}
EXACT_MUON = {"compute_dtype": "float32", "wire_dtype": "float32"}
FLOAT32: dict[str, Any] = {"value_format": "fp32", "sign": False, "merge": "mean"}
# float32 against float64, as for drawn gradients; those of a model are smaller, and lr is 0.1.
EXACT = 1e-5
MATRICES = ["first.weight", "convolution.weight", "second.weight", "branch.weight"]


def _check(gloo: ProcessPool, plan: Plan, **options: Any) -> None:
    num_nodes, ranks_per_node = plan.mesh_shape
    rules = Rules(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        lr=0.1,
        dense_below=16,
        merge="mean",
        base=plan.options.get("base", "sgd"),
        weight_decay=plan.options.get("weight_decay", 0.0),
        **TOP_K,
    )
    expected = reference(plan, rules, **options)
    for weights, residuals in gloo.run(train, plan, ShardedNet, world_size=plan.world_size):
        assert_close(weights, expected.weights, EXACT)
        for node in range(num_nodes):
            found = {name: residual[node] for name, residual in residuals.items()}
            assert_close(found, {name: expected.residual(name, node) for name in found}, EXACT)


@pytest.mark.parametrize(
    ("mesh_shape", "fields"),
    [
        ((2, 2), {"branch_nodes": (1,), "max_norm": 0.1}),
        ((3, 1), {"micro_batches": 3, "max_norm": 0.1}),
        ((3, 1), {"branch_nodes": (0,)}),
    ],
    ids=str,
)
def test_a_sharded_model_trains_as_the_reference(
    gloo: ProcessPool, mesh_shape: tuple[int, int], fields: dict[str, Any]
) -> None:
    _check(gloo, Plan(mesh_shape=mesh_shape, options=OPTIONS | FLOAT32, **fields))


def test_muon_takes_the_matrices_of_a_model(gloo: ProcessPool) -> None:
    muon = {"base": "muon", "weight_decay": 0.1} | EXACT_MUON
    _check(gloo, Plan(mesh_shape=(2, 2), options=OPTIONS | FLOAT32 | muon, num_steps=2), matrices=MATRICES)


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


@pytest.mark.parametrize(
    ("fields", "replicator"),
    [({"max_norm": 0.1}, DCTTopK(**TOP_K)), ({"micro_batches": 2, "branch_nodes": (0,)}, Random(rate=0.25))],
    ids=str,
)
def test_an_exchange_from_the_hooks_gives_the_same_bits(
    gloo: ProcessPool, fields: dict[str, Any], replicator: Any
) -> None:
    options = [OPTIONS | {"overlap": overlap, "replicator": replicator} for overlap in ("backward", "step")]
    plans = [Plan(mesh_shape=(3, 1), options=each, num_steps=5, **fields) for each in options]
    for early, late in gloo.run(train_all, plans, ShardedNet, world_size=plans[0].world_size):
        assert_equal(early[0], late[0])
        assert_equal(early[1], late[1])


# Ways to change a gradient, most of which keep its norm.
CHANGES: dict[str, Callable[[nn.Parameter, Tensor], object]] = {
    "in place": lambda parameter, gradient: gradient.mul_(3.0),
    "negated": lambda parameter, gradient: gradient.neg_(),
    "replaced": lambda parameter, gradient: setattr(parameter, "grad", -gradient),
    "local part": lambda parameter, gradient: local(gradient).neg_(),
    "data": lambda parameter, gradient: gradient.data.mul_(3.0),
}


def _with_gradients_changed() -> list[dict[str, Tensor]]:
    """Some buffers are void, and others are not: messages of all kinds are under way at once."""
    return [_changing(overlap) for overlap in ("backward", "step")]


def _changing(overlap: str) -> dict[str, Tensor]:
    """Every change on one node; two steps between in which nothing changes, so that the bucket is sent early again."""
    options = OPTIONS | {"overlap": overlap, "replicator": Random(rate=0.25)}
    ranks = ShardedNet(Plan(mesh_shape=(3, 1), options=options))
    for number, change in enumerate(CHANGES.values()):
        ranks.train([3 * number, 3 * number + 1])
        ranks.backward(3 * number + 2)
        if ranks.node == number % 3:
            for parameter in (ranks.model.second.weight, ranks.model.norm.bias):
                assert parameter.grad is not None
                change(parameter, parameter.grad)
        ranks.optimizer.step()
        ranks.check_nodes_agree()
    return ranks.weights()


def test_a_gradient_changed_after_backward_counts_as_changed(gloo: ProcessPool) -> None:
    for early, late in gloo.run(_with_gradients_changed, world_size=3):
        assert_equal(early, late)


def _drift(name: str) -> None:
    """Two rows of a weight change places on the second node."""
    ranks = ShardedNet(Plan(mesh_shape=(2, 2), options=OPTIONS | {"check_every": 2}))
    for step in range(4):
        ranks.backward(step)
        ranks.model.reshard()
        if step == 1 and ranks.node == 1 and ranks.shard_rank == 0:
            weight = dict(ranks.model.named_parameters())[name].detach().to_local()  # type: ignore[attr-defined]
            weight.copy_(weight.flip(0))
        ranks.optimizer.step()


def test_a_weight_changed_on_one_node_is_named_on_all_ranks(gloo: ProcessPool) -> None:
    for name in ("second.weight", "frozen.weight"):
        gloo.expect_error_on_all_ranks(_drift, name, match=name, exception=RuntimeError, world_size=4)


def _recorded(plan: Plan) -> list[list[str]]:
    """Names of the ops of each step, which are compared with the program."""
    ran: list[list[str]] = []
    with recorded_ops() as recorded:
        net = ShardedNet(plan)
        for step in range(plan.num_steps):
            net.backward(step)
            net.optimizer.step()
            ran.append(recorded.check())
    return ran


@pytest.mark.parametrize(
    ("fields", "options", "is_early"),
    [
        ({"micro_batches": 2}, {"base": "muon", "compute_dtype": "float32"}, True),
        ({}, {"overlap": "step", "delay": 1, "replicator": Random(rate=0.25)}, False),
        ({"branch_nodes": (0,)}, {"replicator": Random(rate=0.25)}, True),
    ],
    ids=str,
)
def test_steps_run_the_program_op_by_op(
    gloo: ProcessPool, fields: dict[str, Any], options: dict[str, Any], is_early: bool
) -> None:
    plan = Plan(mesh_shape=(3, 1), options=OPTIONS | {"sign": False} | options, num_steps=4, **fields)
    for ran in gloo.run(_recorded, plan, world_size=3):
        assert all("settle[n0]" in names and "decode[n0]" in names for names in ran)
        # The first step makes the plan.
        assert ["early_exchange[n0]" in names for names in ran] == [False, is_early, is_early, is_early]
        assert ["exchange[n0]" in names for names in ran] == [True, not is_early, not is_early, not is_early]
        # The unused layer keeps the bucket that it is in, the last one, from being complete before the step.
        assert sum(name.startswith("early_exchange") for name in ran[1]) >= 3 or fields != {"micro_batches": 2}
