"""Small lists of matrices, small programs and a machine with round numbers, for the tests of plans and programs."""

import torch
from torch import nn

from lightning_muon.comm.collectives import AxisGroup
from lightning_muon.params.layout import Box, Layout, Matrix, MeshMembers, RoutedParameter, ShardBoxes
from lightning_muon.params.routing import route_by_shape
from lightning_muon.schedule.exchange import ExchangeGroup, plan_group
from lightning_muon.schedule.program import TRANSFER, Op, OpKind, Program
from lightning_muon.schedule.simulate import CostModel

# A FLOP takes a second, and so does a byte on the wire; memory traffic is free.
UNIT = CostModel(flops_per_second=1.0, memory_bytes_per_second=1e30, bandwidth=(1.0,))


def sharded(numels: list[int], num_ranks: int, num_replicas: int = 1) -> list[Matrix]:
    """Matrices of one column whose rows are cut as torch.chunk does, in each replica; a FLOP for each element."""
    num_shards, matrices = num_ranks // num_replicas, list[Matrix]()
    for index, numel in enumerate(numels):
        part, route = -(-numel // num_shards), route_by_shape(f"w{index}", (numel, 1))
        cuts = [(min(numel, part * shard), min(numel, part * (shard + 1))) for shard in range(num_shards)]
        boxes = ShardBoxes(
            [Box((start, 0), (stop, 1)) for start, stop in cuts] * num_replicas, grid(num_replicas, num_shards)
        )
        parameter = RoutedParameter(nn.Parameter(torch.empty(numel, 1, device="meta")), {}, route, Layout())
        matrices.append(Matrix(parameter, Box((0, 0), (numel, 1)), numel, 1, 0, boxes, rank=0, flops=numel))
    return matrices


def grid(num_replicas: int, num_shards: int) -> list[int]:
    """Replica of each rank, for the order of :func:`sharded`."""
    return [replica for replica in range(num_replicas) for _ in range(num_shards)]


def step_of(matrices: list[Matrix]) -> Program:
    """The ops of all ranks with one matrix per owner in a bucket, and AdamW behind them, as an optimizer has it."""
    replica_of = matrices[0].shards.replica_of
    axes = AxisGroup(None, 0, tuple((rank,) for rank in range(len(replica_of))))
    group = ExchangeGroup(MeshMembers(None, axes, axes, ()), (0,), axes, replica_of, matrices)
    plan_group(group, itemsize=2, bucket_bytes=1, ranks=range(len(replica_of)))
    return {rank: [*ops, Op(kind=OpKind.ADAMW, key="0", rank=rank, bytes=1)] for rank, ops in group.program.items()}


def compute(name: str, cost: int, *deps: str, rank: int = 0, memory: int = 0) -> Op:
    """An op of some seconds on the compute lane, key 0."""
    return Op(kind=name, key="0", rank=rank, cost=cost, deps=deps, memory=memory)


def collective(name: str, size: int, *deps: str, rank: int = 0, group: tuple[int, ...] = (), memory: int = 0) -> Op:
    """An op of some seconds on the transfer lane."""
    return Op(kind=name, key="0", rank=rank, bytes=size, lane=TRANSFER, deps=deps, group=group, memory=memory)
