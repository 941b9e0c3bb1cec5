"""The package's own codec and exchange, for all nodes in one process, against the run on several: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, FlexDeMoConfig, Full, Striding
from lightning_muon.flexdemo.bucket import MomentumBucket
from lightning_muon.flexdemo.bucket_plan import plan_buckets, shapes_of
from lightning_muon.flexdemo.node_exchange import Exchange
from lightning_muon.flexdemo.replicators import ExchangeStep
from tests.distributed.flexdemo.setup import SMALL, Case, assert_equal, train_all
from tests.support.processes import ProcessPool
from tests.unit.flexdemo.cases import PostOffice, nodes_of


def _simulate(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and residuals of all nodes of one rank, with plain SGD as the base."""
    config, num_nodes, weights = FlexDeMoConfig(**case.options), case.mesh_shape[0], case.weights()
    tensors = list(weights.values())
    residuals = [{tensor: torch.zeros_like(tensor) for tensor in tensors} for _ in range(num_nodes)]
    plans = plan_buckets(shapes_of(tensors), config)
    buckets = [[MomentumBucket(plan, tensors, residual) for residual in residuals] for plan in plans]
    for step in range(case.num_steps):
        gradients = [case.gradients(step, node) for node in range(num_nodes)]
        for number, of_nodes in enumerate(buckets):
            exchange_step = ExchangeStep(step, number)
            exchanges: list[Exchange] = []
            for bucket, groups, gradient in zip(of_nodes, nodes_of(num_nodes), gradients, strict=True):
                bucket.accumulate({weights[name]: gradient[name] for name in weights}, config.decay)
                exchanges.append(Exchange(bucket.plan, bucket.encode(exchange_step), groups))
            for each in exchanges:
                each.groups.send_sums_until(each)
            for bucket, each in zip(of_nodes, exchanges, strict=True):
                merged = each.result(config.merge)
                bucket.settle(each.own, exchange_step, set(tensors))
                updates = bucket.decode(merged, exchange_step, set(bucket.parameters), sign=config.takes_sign)
            for tensor, update in updates.items():
                tensor.add_(update, alpha=-0.01)
    return weights, {name: torch.stack([each[weight] for each in residuals]) for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("num_nodes", "replicator"), [(3, DCTTopK(chunk_size=8, top_k=5)), (4, Striding(rate=0.25)), (2, Full())], ids=str
)
def test_one_process_gives_the_bits_of_many(
    gloo: ProcessPool, monkeypatch: pytest.MonkeyPatch, num_nodes: int, replicator: Any
) -> None:
    PostOffice().take_over(monkeypatch)
    options = SMALL | {"replicator": replicator, "chunk_bytes": 4000}
    formats = ("bf16", "int8")
    cases = [Case(mesh_shape=(num_nodes, 1), options=options | {"value_format": name}) for name in formats]
    expected = [_simulate(case) for case in cases]
    for results in gloo.run(train_all, cases, world_size=num_nodes):
        for found, (weights, residuals) in zip(results, expected, strict=True):
            assert_equal(found[0], weights)
            assert_equal(found[1], residuals)
