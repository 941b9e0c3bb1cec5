"""The package's own codec and exchange, for all nodes in one process, against the run on several: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, FlexDeMoConfig, Full, Striding
from lightning_muon.flexdemo.bucket import MomentumBucket
from lightning_muon.flexdemo.bucket_plan import Shape, plan_buckets
from lightning_muon.flexdemo.node_exchange import Exchange
from lightning_muon.flexdemo.replicators import ExchangeStep
from tests.distributed.flexdemo.setup import SMALL, Case, assert_equal, train_all
from tests.support.processes import ProcessPool
from tests.unit.flexdemo.cases import PostOffice, nodes_of


def _rows(tensor: Tensor, index: int, num_shards: int) -> Tensor:
    if not tensor.ndim:
        return tensor if index == 0 else tensor.clone()
    pieces = torch.chunk(tensor, num_shards)
    return pieces[index] if index < len(pieces) else tensor[:0]


def _simulate(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and residuals of all nodes, with plain SGD as the base."""
    num_nodes, num_shards = case.mesh_shape
    weights = case.weights()
    residuals = {name: torch.zeros(num_nodes, *weight.shape) for name, weight in weights.items()}
    for index in range(num_shards):
        own = {name: _rows(weight, index, num_shards) for name, weight in weights.items()}
        shapes = [Shape(tuple(weights[name].shape), tuple(part.shape)) for name, part in own.items()]
        config = FlexDeMoConfig(**case.options)
        plans = plan_buckets(shapes, config)
        tensors = list(own.values())
        of_nodes = [
            {tensor: _rows(residuals[name][node], index, num_shards) for name, tensor in own.items()}
            for node in range(num_nodes)
        ]
        buckets = [[MomentumBucket(plan, tensors, residual) for residual in of_nodes] for plan in plans]
        for step in range(case.num_steps):
            gradients = [case.gradients(step, node) for node in range(num_nodes)]
            local = [{t: _rows(g[name], index, num_shards) for name, t in own.items()} for g in gradients]
            _step(config, buckets, local, step)
    return weights, residuals


def _step(
    config: FlexDeMoConfig, buckets: list[list[MomentumBucket]], gradients: list[dict[Tensor, Tensor]], step: int
) -> None:
    """Exchange all buckets of all nodes and update the weights of one shard."""
    updates: dict[Tensor, Tensor] = {}
    for number, of_nodes in enumerate(buckets):
        exchange_step = ExchangeStep(step, number)
        exchanges: list[Exchange] = []
        for node, (bucket, groups) in enumerate(zip(of_nodes, nodes_of(len(gradients)), strict=True)):
            bucket.accumulate(gradients[node], config.decay)
            exchanges.append(Exchange(bucket.plan, bucket.encode(exchange_step), groups))
        for each in exchanges:
            each.groups.send_sums_until(each)
        for node, bucket in enumerate(of_nodes):
            merged = exchanges[node].result(config.merge)
            bucket.settle(exchanges[node].own, exchange_step, gradients[node])
            mine = bucket.decode(merged, exchange_step, set(bucket.parameters), sign=config.takes_sign)
            for tensor, update in mine.items():
                assert node == 0 or torch.equal(update, updates[tensor])
            updates |= mine
    for tensor, update in updates.items():
        tensor.add_(update, alpha=-0.01)


@pytest.mark.parametrize(
    ("mesh_shape", "replicator"),
    [
        ((2, 2), DCTTopK(chunk_size=8, top_k=5)),
        ((3, 1), Striding(rate=0.25)),
        ((2, 1), Full()),
    ],
    ids=str,
)
def test_one_process_gives_the_bits_of_many(
    gloo: ProcessPool, monkeypatch: pytest.MonkeyPatch, mesh_shape: tuple[int, int], replicator: Any
) -> None:
    PostOffice().take_over(monkeypatch)
    options = SMALL | {"replicator": replicator, "chunk_bytes": 4000}
    cases = [Case(mesh_shape=mesh_shape, options=options | {"value_format": name}) for name in ("bf16", "int8")]
    expected = [_simulate(case) for case in cases]
    for results in gloo.run(train_all, cases, world_size=cases[0].world_size):
        for found, (weights, residuals) in zip(results, expected, strict=True):
            assert_equal(found[0], weights)
            assert_equal(found[1], residuals)
