"""Shapes, replicators and buckets that several tests share, and nodes in one process whose messages go by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_muon import DCTTopK, FlexDeMoConfig, Full, Random, Replicator, Slicing, Striding
from lightning_muon.comm.groups import AxisGroup
from lightning_muon.flexdemo import bucket as bucket_module
from lightning_muon.flexdemo.bucket import MomentumBucket
from lightning_muon.flexdemo.bucket_plan import BucketPlan, Shape, plan_buckets

REPLICATORS: list[Replicator] = [
    DCTTopK(chunk_size=8, top_k=5),
    DCTTopK(chunk_size=16, top_k=3, strips=True),
    Random(rate=0.25, seed=3),
    Striding(rate=1 / 3),
    Slicing(rate=0.25),
    Full(),
]
FORMATS = ("fp32", "bf16", "int8", "sign")
# Primes, smaller than a block, whole blocks, a convolution, a stack, one and no dimension.
SHAPES: list[tuple[int, ...]] = [(13, 7), (127, 13), (3, 4), (16, 24), (6, 4, 3, 3), (3, 10, 6), (5,), (), (1, 19)]


def short_name(value: object) -> str:
    return type(value).__name__ + ("-strips" if getattr(value, "strips", False) else "")


def plans_for(tensors: Sequence[Tensor], replicator: Replicator, **options: Any) -> list[BucketPlan]:
    """Plans for whole tensors, with few that travel dense."""
    options = {"value_format": "fp32", "dense_below": 10, "chunk_bytes": 10**6} | options
    shapes = [Shape(tuple(tensor.shape), tuple(tensor.shape)) for tensor in tensors]
    return plan_buckets(shapes, FlexDeMoConfig(replicator=replicator, **options))


def drawn(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def one_bucket(
    tensors: Sequence[Tensor], replicator: Replicator, seed: int, **options: Any
) -> tuple[MomentumBucket, dict[Tensor, Tensor]]:
    """A bucket of all tensors, and its residuals, which are drawn and loaded."""
    (plan,) = plans_for(tensors, replicator, **options)
    residuals = dict(zip(tensors, drawn([tuple(t.shape) for t in tensors], seed), strict=True))
    bucket = MomentumBucket(plan, tensors, residuals)
    bucket.load()
    return bucket, residuals


@dataclass
class Delivery:
    """What a node receives, which is there as soon as it was sent."""

    post: PostOffice
    receive: Mapping[int, Tensor]
    rank: int
    leg: str

    def wait(self) -> None:
        for sender, tensor in self.receive.items():
            tensor.copy_(self.post.boxes[self.leg, sender, self.rank].pop(0))


@dataclass
class PostOffice:
    """Stands in for the messages between nodes: (leg, sender, receiver) -> messages."""

    boxes: dict[tuple[str, int, int], list[Tensor]] = field(default_factory=dict)

    def start_messages(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor], group: Any) -> list[Delivery]:
        for receiver, tensor in send.items():
            self.boxes.setdefault((group.group, group.rank, receiver), []).append(tensor.clone())
        return [Delivery(self, dict(receive), group.rank, group.group)] if receive else []

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> PostOffice:
        """Carry the messages of all exchanges of the test."""
        monkeypatch.setattr(bucket_module, "start_messages", self.start_messages)
        return self


def nodes_of(num_nodes: int) -> list[list[AxisGroup]]:
    """What each of the nodes knows of them."""
    coordinates = tuple((other,) for other in range(num_nodes))
    return [
        [AxisGroup(leg, node, coordinates) for leg in ("there", "back")]  # type: ignore[arg-type]
        for node in range(num_nodes)
    ]
