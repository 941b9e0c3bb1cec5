"""The package's own codec and exchange, for all nodes in one process, against the run on several: the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, FlexDeMoConfig, Full, Random, Slicing, Striding
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.flexdemo import node_exchange
from lightning_muon.flexdemo.bucket import MomentumBucket
from lightning_muon.flexdemo.bucket_plan import Shape, plan_buckets
from lightning_muon.flexdemo.node_exchange import Exchange, NodeGroups
from lightning_muon.flexdemo.replicator import ExchangeStep
from tests.distributed.flexdemo.setup import SMALL, Case, assert_equal, train_all
from tests.support.processes import ProcessPool

MESHES = [(2, 1), (2, 2), (4, 1), (3, 1)]


@dataclass
class Delivery:
    """What a node receives, filled in when it waits for it."""

    mail: dict[tuple[str, int, int], list[Tensor]]
    receive: Mapping[int, Tensor]
    rank: int
    leg: str

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        for sender, tensor in self.receive.items():
            tensor.copy_(self.mail[self.leg, sender, self.rank].pop(0))


class PostOffice:
    """Stands in for the messages between nodes, all of which are in this process."""

    def __init__(self) -> None:
        self.mail: dict[tuple[str, int, int], list[Tensor]] = {}

    def start_messages(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor], group: Any) -> list[Delivery]:
        for receiver, tensor in send.items():
            self.mail.setdefault((group.group, group.rank, receiver), []).append(tensor.clone())
        return [Delivery(self.mail, dict(receive), group.rank, group.group)]


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
        plans = plan_buckets(
            shapes,
            replicator=config.replicator,
            value_format_name=config.value_format,
            dense_below=config.dense_below,
            chunk_bytes=config.chunk_bytes,
        )
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
    num_nodes = len(gradients)
    updates: dict[Tensor, Tensor] = {}
    for number, of_nodes in enumerate(buckets):
        turn = ExchangeStep(step, number)
        exchanges: list[Exchange] = []
        for node, bucket in enumerate(of_nodes):
            bucket.accumulate(gradients[node], config.decay, {})
            own = bucket.encode(turn)
            coordinates = tuple((other,) for other in range(num_nodes))
            there, back = (AxisGroup(leg, node, coordinates) for leg in ("there", "back"))  # type: ignore[arg-type]
            exchanges.append(Exchange(bucket.plan, own, NodeGroups(there, back)))
        for each in exchanges:
            each.nodes.send_sums_until(each)
        for node, bucket in enumerate(of_nodes):
            merged = exchanges[node].result(config.merge)
            bucket.settle(exchanges[node].own, turn, gradients[node])
            mine = {tensor: torch.zeros_like(tensor) for tensor in bucket.parameters}
            bucket.decode(merged, turn, mine, sign=config.takes_sign)
            for tensor, update in mine.items():
                assert node == 0 or torch.equal(update, updates[tensor])
            updates |= mine
    for tensor, update in updates.items():
        tensor.add_(update, alpha=-0.01)


@pytest.mark.parametrize(
    "replicator",
    [DCTTopK(chunk_size=8, top_k=5), Random(rate=0.25, seed=3), Striding(rate=0.25), Slicing(rate=0.25), Full()],
    ids=lambda replicator: type(replicator).__name__,
)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_one_process_gives_the_bits_of_many(
    gloo: ProcessPool, monkeypatch: pytest.MonkeyPatch, mesh_shape: tuple[int, int], replicator: Any
) -> None:
    office = PostOffice()
    for name in ("start_messages", "start_messages_together"):
        monkeypatch.setattr(node_exchange, name, office.start_messages)
    options = SMALL | {"replicator": replicator, "chunk_bytes": 4000}
    formats = ("fp32", "bf16", "int8", "sign")
    cases = [Case(mesh_shape=mesh_shape, options=options | {"value_format": name}) for name in formats]
    expected = [_simulate(case) for case in cases]
    for results in gloo.run(train_all, cases, world_size=cases[0].world_size):
        for found, (weights, residuals) in zip(results, expected, strict=True):
            assert_equal(found[0], weights)
            assert_equal(found[1], residuals)
