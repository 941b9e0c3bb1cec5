"""Small lists of matrices, small programs and a machine with round numbers, for the tests of plans and programs."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lightning_muon.comm.groups import AxisGroup
from lightning_muon.params.layout import Box, Layout, MeshMembers, RoutedParameter
from lightning_muon.params.matrices import Matrix, ShardBoxes
from lightning_muon.params.routing import route_by_shape
from lightning_muon.schedule.cost import CostModel
from lightning_muon.schedule.exchange import ExchangeGroup, plan_group
from lightning_muon.schedule.program import TRANSFER, Op, OpKind, Program

# A FLOP takes a second, and so does a byte on the wire; memory traffic is free.
UNIT = CostModel(flops_per_second=1.0, memory_bytes_per_second=1e30, bandwidth=(1.0,))


def spec(name: str, numel: int, held: Sequence[int], replica_of: Sequence[int], *, flops: int = 1) -> Matrix:
    """A matrix of one column, of which the ranks of each replica hold rows one after the other."""
    shape, starts, boxes = (numel, 1), Counter[int](), list[Box]()
    for replica, count in zip(replica_of, held, strict=True):
        boxes.append(Box((starts[replica], 0), (starts[replica] + count, 1)))
        starts[replica] += count
    parameter = RoutedParameter(
        nn.Parameter(torch.empty(shape, device="meta")), {}, route_by_shape(name, shape), Layout()
    )
    return Matrix(parameter, Box((0, 0), shape), numel, 1, 0, ShardBoxes(boxes, replica_of), 0, flops)


def sharded(numels: list[int], num_ranks: int, num_replicas: int = 1, flops: list[int] | None = None) -> list[Matrix]:
    """Matrices cut as evenly as torch.chunk does, in each replica; rank = replica * shards + shard."""
    num_shards, replica_of = num_ranks // num_replicas, grid(num_replicas, num_ranks // num_replicas)
    specs: list[Matrix] = []
    for index, numel in enumerate(numels):
        part = -(-numel // num_shards)
        pieces = tuple(max(0, min(part, numel - part * shard)) for shard in range(num_shards))
        cost = flops[index] if flops is not None else numel
        specs.append(spec(f"w{index}", numel, pieces * num_replicas, replica_of, flops=cost))
    return specs


def grid(num_replicas: int, num_shards: int) -> list[int]:
    """Replica of each rank, for the order of :func:`sharded`."""
    return [replica for replica in range(num_replicas) for _ in range(num_shards)]


def plan_of(specs: list[Matrix], **options: Any) -> ExchangeGroup:
    """The plan with one matrix per owner in a bucket, with the ops of all ranks."""
    replica_of = specs[0].shards.replica_of
    axes = AxisGroup(None, 0, tuple((rank,) for rank in range(len(replica_of))))
    group = ExchangeGroup(MeshMembers(None, axes, axes, ()), (0,), axes, replica_of, specs)
    plan_group(group, **({"itemsize": 2, "bucket_bytes": 1, "ranks": range(len(replica_of))} | options))
    return group


def with_adamw(program: Program, size: int = 1) -> Program:
    """With an ``adamw`` op of these bytes behind each rank's ops, as an optimizer has it."""
    return {rank: [*ops, Op(kind=OpKind.ADAMW, key="0", rank=rank, bytes=size)] for rank, ops in program.items()}


def compute(name: str, cost: int, *deps: str, rank: int = 0, memory: int = 0) -> Op:
    """An op of some seconds on the compute lane, key 0."""
    return Op(kind=name, key="0", rank=rank, cost=cost, deps=deps, memory=memory)


def collective(name: str, size: int, *deps: str, rank: int = 0, group: tuple[int, ...] = (), memory: int = 0) -> Op:
    """An op of some seconds on the transfer lane."""
    return Op(kind=name, key="0", rank=rank, bytes=size, lane=TRANSFER, deps=deps, group=group, memory=memory)
