"""Plans which matrices are exchanged among which ranks, their buckets and owners, and the ops of a step.

The optimizer calls :func:`plan_exchanges` with its parameters, ``lightning-muon plan`` with parameters on the meta
device and without processes.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain

from torch import Tensor

from lightning_muon.comm.collectives import AxisGroup
from lightning_muon.config import ExchangeOptions
from lightning_muon.math.newton_schulz import Arithmetic, NewtonSchulzOptions
from lightning_muon.params.layout import (
    AxisPlacement,
    Matrix,
    MeshMembers,
    RoutedParameter,
    ShardBoxes,
    held_boxes,
    matrices_in,
    sharded_axes,
)
from lightning_muon.schedule.program import TRANSFER, Op, OpKind, Program
from lightning_muon.schedule.simulate import PRESETS

# Gradients, momenta and weights are counted as float32.
STATE_ITEMSIZE = 4
# AdamW reads gradient, weight and two moments, and writes the last three.
ADAMW_TENSORS = 7


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ExchangeOptions):
    """The options that decide about owners, buckets and order."""

    itemsize: int  # Bytes of an element on the wire.
    arithmetic: Arithmetic  # Arithmetic of Newton-Schulz.

    @property
    def issued_ahead(self) -> int:
        """How many buckets are issued ahead: ``look_ahead``, or none without overlap."""
        return 0 if self.overlap == "off" else self.look_ahead


@dataclass(eq=False)
class ExchangeGroup:
    """Matrices that are exchanged among the same ranks, and their plan, equal on all of them but for ``program``."""

    members: MeshMembers  # The mesh of their parameters.
    mesh_axes: tuple[int, ...]  # Its axes over which they are exchanged.
    axes: AxisGroup  # The ranks that differ along these axes.
    replica_of: tuple[int, ...]  # Replica of each rank; the ranks of a replica hold the whole matrices together.
    matrices: list[Matrix] = field(default_factory=list[Matrix])  # In the order of the parameters.
    # The planner sets these. Indices of the matrices of each bucket, which are sent together, in the order in which
    # backward finishes them; buckets of matrices that lie on one rank alone come first.
    buckets: tuple[tuple[int, ...], ...] = ()
    # For each requested rank the ops of bucket after bucket: `STEP_KINDS`, without empty transfers.
    program: Program = field(default_factory=dict[int, list[Op]])

    @classmethod
    def over(cls, members: MeshMembers, sharded: tuple[int, ...], is_shared: bool) -> ExchangeGroup:
        """That of matrices that are sharded over the axes ``sharded`` of a mesh, replicated over the others.

        With ``is_shared`` one owner serves all replicas, on any rank of the mesh; otherwise each replica has its own.
        Collective over the mesh the first time.
        """
        mesh_axes = tuple(range(len(members.shape))) if is_shared else sharded
        axes, replicas = members.along(mesh_axes), dict[tuple[int, ...], int]()
        replica_of = tuple(
            replicas.setdefault(tuple(index for axis, index in enumerate(each) if axis not in sharded), len(replicas))
            for each in axes.coordinates
        )
        return cls(members, mesh_axes, axes, replica_of)

    @property
    def flops(self) -> tuple[int, ...]:
        """Newton-Schulz load of each rank."""
        found = [0] * self.axes.size
        for matrix in self.matrices:
            found[matrix.owner] += matrix.flops
        return tuple(found)


def plan_exchanges(
    parameters: Sequence[RoutedParameter],
    meshes: Sequence[MeshMembers],
    options: PlanOptions,
    *,
    of_all_ranks: bool = False,
) -> list[ExchangeGroup]:
    """Plan owners, buckets and ops of every exchange group, those that stay within a replica first.

    Every rank of the meshes gets the same owners and buckets; ops are those of the calling rank, or ``of_all_ranks``.
    ``parameters`` are all trainable ones in the order of the forward pass, the same on all ranks of their mesh.
    Collective over ``meshes`` the first time.
    """
    planned: list[ExchangeGroup] = []
    for number, group in enumerate(_grouped(parameters, meshes, options)):
        plan_group(
            group,
            itemsize=options.itemsize,
            bucket_bytes=options.bucket_bytes,
            loads=_loads_so_far(group, planned, options.itemsize),
            key_prefix=f"{number}.",
            ranks=range(group.axes.size) if of_all_ranks else (group.axes.rank,),
        )
        planned.append(group)
    return planned


def plan_group(
    group: ExchangeGroup,
    *,
    itemsize: int,
    bucket_bytes: int,
    loads: Sequence[Load] | None = None,
    key_prefix: str = "",
    ranks: Sequence[int],
) -> None:
    """Assign owners and buckets of the matrices of a group, which are in forward order, and list the ops of ``ranks``.

    ``bucket_bytes`` bounds what an average owner holds of a bucket, at ``itemsize`` bytes for an element on the wire;
    ``loads`` are the earlier loads of each rank.
    """
    num_ranks, matrices = group.axes.size, group.matrices
    sizes, sole_holders = ([m.numel * itemsize for m in matrices], [m.sole_holder for m in matrices])
    group.buckets = tuple(fill_buckets(sizes, sole_holders, num_owners=num_ranks, bucket_bytes=bucket_bytes))
    loads = [(0, 0)] * num_ranks if loads is None else loads
    assign_owners(matrices, group.buckets, itemsize=itemsize, loads=loads)
    group.program, everyone = {rank: [] for rank in ranks}, tuple(range(num_ranks))
    for number, bucket in enumerate(group.buckets):
        moved = count_elements([matrices[index] for index in bucket], group.replica_of)
        owned: dict[int, list[int]] = {}
        for index in bucket:
            owned.setdefault(matrices[index].owner, []).append(index)
        for rank in ranks:
            items = tuple(owned.get(rank, ()))
            work = Op(
                kind=OpKind.NEWTON_SCHULZ,
                key=f"{key_prefix}{number}",
                rank=rank,
                cost=sum(matrices[index].flops for index in items),
                items=items,
            )
            group.program[rank] += _ops_of_bucket(work, bucket, everyone, moved, itemsize)


def _ops_of_bucket(
    work: Op, bucket: tuple[int, ...], everyone: tuple[int, ...], moved: Traffic, itemsize: int
) -> list[Op]:
    """All ops of a bucket on one rank, whose ``work`` is Newton-Schulz; a collective needs ranks without work, too."""
    key, rank = work.key, work.rank

    def transfer(kind: str, *moves: tuple[int, int]) -> Op:
        """Op that sends ``moves``: elements sent and received, within the replica and between replicas."""
        sent, received = (sum(column) * itemsize for column in zip(*moves, strict=True))
        return Op(
            kind=kind,
            key=key,
            rank=rank,
            deps=(ops[-1].name,),
            lane=TRANSFER,
            bytes=max(sent, received),
            axis_bytes=tuple(max(pair) * itemsize for pair in moves),
            memory=received,
            items=bucket,
            group=everyone,
        )

    held, packed = moved.held[rank], moved.gather_sent[rank] * itemsize
    updates = sum(sent[rank] for sent in moved.scatter_sent) * itemsize
    # The gradient is read, the momentum is read and written, and the pieces for the owners are written.
    momentum_bytes = 3 * STATE_ITEMSIZE * held + packed
    ops = [Op(kind=OpKind.MOMENTUM, key=key, rank=rank, bytes=momentum_bytes, memory=packed, items=bucket)]
    if any(moved.gather_received):
        ops.append(transfer(OpKind.GATHER, (moved.gather_sent[rank], moved.gather_received[rank]), (0, 0)))
    # The received pieces are read and the matrices written; the updates to be sent are read and written.
    work_bytes = 2 * itemsize * moved.owned[rank] + 2 * updates
    ops.append(replace(work, deps=(ops[-1].name,), bytes=work_bytes, memory=updates))
    if any(map(any, moved.scatter_received)):
        axes = zip(moved.scatter_sent, moved.scatter_received, strict=True)
        ops.append(transfer(OpKind.SCATTER, *((sent[rank], received[rank]) for sent, received in axes)))
    # The update is read, the weight is read and written.
    update_bytes = (itemsize + 2 * STATE_ITEMSIZE) * held
    ops.append(Op(kind=OpKind.UPDATE, key=key, rank=rank, deps=(ops[-1].name,), bytes=update_bytes, items=bucket))
    return ops


def _grouped(
    parameters: Sequence[RoutedParameter], meshes: Sequence[MeshMembers], options: PlanOptions
) -> list[ExchangeGroup]:
    """The matrices by the ranks among which they are exchanged, not planned yet; arguments as above."""
    members_of: Mapping[Tensor, MeshMembers] = {tensor: members for members in meshes for tensor in members.tensors}
    found: list[tuple[RoutedParameter, tuple[AxisPlacement, ...], tuple[int, ...]]] = []
    num_alike: Counter[tuple[MeshMembers, tuple[int, ...]]] = Counter()
    for each in parameters:
        _, placements = each.layout.mesh_and_placements(each.tensor)
        members = members_of[each.tensor]
        sharded = sharded_axes(placements, members.shape, each.route.name)
        found.append((each, placements, sharded))
        num_alike[members, sharded] += len(matrices_in(tuple(each.tensor.shape), each.route))
    groups: dict[tuple[MeshMembers, tuple[int, ...], bool], ExchangeGroup] = {}

    # A large model has few different shapes.
    @cache
    def shards_of(group: ExchangeGroup, shape: tuple[int, ...], placements: tuple[AxisPlacement, ...]) -> ShardBoxes:
        boxes = held_boxes(shape, group.members.shape, placements, group.axes.coordinates)
        return ShardBoxes(boxes, group.replica_of)

    @cache
    def flops_and_group(
        members: MeshMembers, sharded: tuple[int, ...], rows: int, cols: int, newton_schulz: NewtonSchulzOptions
    ) -> tuple[int, ExchangeGroup]:
        flops = newton_schulz.flops(rows, cols, options.arithmetic)
        is_shared = options.dedupe == "always"
        if options.dedupe == "auto":
            replica_ranks = math.prod(members.shape[axis] for axis in sharded)
            is_shared = sharing_pays(
                flops,
                rows * cols * options.itemsize,
                device_type=options.arithmetic.device_type,
                num_matrices=num_alike[members, sharded],
                num_replicas=math.prod(members.shape) // replica_ranks,
                replica_ranks=replica_ranks,
            )
        key = members, sharded, is_shared
        return flops, groups.get(key) or groups.setdefault(key, ExchangeGroup.over(*key))

    for each, placements, sharded in found:
        shape, newton_schulz = tuple(each.tensor.shape), NewtonSchulzOptions.of(each.group)
        for number, (box, rows, cols) in enumerate(matrices_in(shape, each.route)):
            flops, group = flops_and_group(members_of[each.tensor], sharded, rows, cols, newton_schulz)
            shards = shards_of(group, shape, placements)
            group.matrices.append(Matrix(each, box, rows, cols, number, shards, group.axes.rank, flops))
    return sorted(groups.values(), key=lambda group: any(group.replica_of))


def _loads_so_far(group: ExchangeGroup, earlier: Sequence[ExchangeGroup], itemsize: int) -> list[Load]:
    """FLOPs and bytes that every rank of an exchange group owns in ``earlier`` ones; the same in each replica.

    Replicas that repeat the work must have the same owners, and so the same batches: on CUDA a matrix in a batch may
    get other bits than alone. If loads differ between replicas, the largest one counts. Of another mesh, such as that
    of experts, groups of the same ranks count.
    """
    totals = [(0, 0)] * group.axes.size
    for each in earlier:
        is_alike = each.axes.ranks == group.axes.ranks != ()
        if not is_alike and each.members is not group.members:
            continue
        owned = [(0, 0)] * each.axes.size
        for matrix in each.matrices:
            flops, size = owned[matrix.owner]
            owned[matrix.owner] = flops + matrix.flops, size + matrix.numel * itemsize
        if is_alike:
            totals = [(flops + own[0], size + own[1]) for (flops, size), own in zip(totals, owned, strict=True)]
            continue
        # Replicas of the earlier group on other ranks of the mesh do the same as this one.
        common = [axis for axis in each.mesh_axes if axis in group.mesh_axes]
        largest: dict[tuple[int, ...], Load] = {}
        for coordinate, load in zip(each.axes.coordinates, owned, strict=True):
            place = tuple(coordinate[axis] for axis in common)
            largest[place] = max(load, largest.get(place, load))
        for index, coordinate in enumerate(group.axes.coordinates):
            flops, size = largest[tuple(coordinate[axis] for axis in common)]
            totals[index] = totals[index][0] + flops, totals[index][1] + size
    return totals


Load = tuple[int, int]
"""FLOPs and bytes of a rank."""
_H100 = PRESETS["h100"]
# FLOP/s of Newton-Schulz over bytes/s between two replicas, per rank. CPU: measured on two cores with AVX-512 BF16 and
# gloo over loopback (benchmarks/plan_accuracy.py prints both).
_FLOPS_PER_BYTE = {"cuda": _H100.flops_per_second / _H100.bandwidth[-1], "cpu": 400.0}


def fill_buckets(
    sizes: Sequence[int], sole_holders: Sequence[int | None], *, num_owners: int, bucket_bytes: int
) -> list[tuple[int, ...]]:
    """Indices of the matrices of each bucket, the last matrix first: backward finishes gradients about in this order.

    A bucket is closed when it has a matrix for each owner and the next one would take it above ``num_owners *
    bucket_bytes``. Matrices that lie on one rank alone come first, in buckets of their own, with at most
    ``bucket_bytes`` per rank: each rank fills its own sequence of buckets, so that all ranks have work in each of them.
    """
    resident: list[list[int]] = []
    travelling: list[list[int]] = []
    # Sole holder, or None -> number of the bucket that is being filled, and its matrices and bytes so far.
    state: dict[int | None, tuple[int, int, int]] = {}
    for matrix in reversed(range(len(sizes))):
        holder = sole_holders[matrix]
        buckets, least = (travelling, num_owners) if holder is None else (resident, 1)
        number, count, filled = state.get(holder, (0, 0, 0))
        if count >= least and filled + sizes[matrix] > least * bucket_bytes:
            number, count, filled = number + 1, 0, 0
        state[holder] = (number, count + 1, filled + sizes[matrix])
        if number == len(buckets):
            buckets.append([])
        buckets[number].append(matrix)
    return [tuple(bucket) for bucket in (*resident, *travelling)]


def assign_owners(
    matrices: Sequence[Matrix], buckets: Sequence[Sequence[int]], *, itemsize: int, loads: Sequence[Load]
) -> None:
    """Set the owner of each matrix; ``loads`` are what ranks have already, ``itemsize`` are bytes on the wire.

    A matrix that lies on one rank alone stays there. The others by :func:`longest_first`, bucket by bucket, and then
    :func:`even_out` on the last buckets.
    """
    loads = list(loads)
    for matrix in matrices:
        if matrix.sole_holder is not None:
            matrix.owner = matrix.sole_holder
            loads[matrix.owner] = (loads[matrix.owner][0] + matrix.flops, loads[matrix.owner][1])
    costs = [matrix.flops for matrix in matrices]
    sizes = [matrix.numel * itemsize for matrix in matrices]
    shared = [[index for index in bucket if matrices[index].sole_holder is None] for bucket in buckets]
    assigned = [longest_first(costs, sizes, loads, taken=bucket) for bucket in shared]
    even_out(assigned[-EVENED_BUCKETS:], costs, sizes, loads)
    for index, owner in chain.from_iterable(each.items() for each in assigned):
        matrices[index].owner = owner


def longest_first(
    costs: Sequence[int], sizes: Sequence[int], loads: list[Load], *, taken: Sequence[int]
) -> dict[int, int]:
    """Job -> rank: each job of ``taken``, most expensive first, goes to the rank with the least of ``loads``.

    ``loads`` is updated in place. The largest one is within 4/3 of the optimum (Graham 1969, Bounds on multiprocessing
    timing anomalies).
    """
    heap = [(*load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    owners: dict[int, int] = {}
    for job in sorted(taken, key=lambda index: (-costs[index], -sizes[index], index)):
        load_flops, load_bytes, rank = heap[0]
        owners[job] = rank
        loads[rank] = (load_flops + costs[job], load_bytes + sizes[job])
        heapq.heapreplace(heap, (*loads[rank], rank))
    return owners


# Number of last buckets in which owners may change. Loads of earlier ones are evened out by later buckets, and every
# exchange makes the ranks finish a bucket at more different times.
EVENED_BUCKETS = 4
# Limit of comparisons of two matrices, about half a second, so that plans for thousands of ranks are quick.
MOST_COMPARISONS = 1_000_000


def even_out(owners: Sequence[dict[int, int]], costs: Sequence[int], sizes: Sequence[int], loads: list[Load]) -> None:
    """Relieve the busiest rank by the exchange that helps most, until none helps; in place, alike on all ranks.

    A matrix goes to another rank, alone or in exchange for a cheaper one of its bucket; both ranks then have less to
    do.
    """
    compared = 0
    while compared < MOST_COMPARISONS:
        busiest = max(range(len(loads)), key=lambda rank: (loads[rank][0], -rank))
        idlest = min(range(len(loads)), key=lambda rank: (loads[rank][0], rank))
        # The larger load of both ranks afterwards, bucket, matrix, its next rank, and the matrix in exchange, or -1.
        found: list[tuple[int, int, int, int, int]] = []
        for number, bucket in enumerate(owners):
            for matrix in [matrix for matrix, owner in bucket.items() if owner == busiest]:
                compared += len(bucket)
                for other, rank in [(-1, idlest), *bucket.items()]:
                    relief = costs[matrix] - (costs[other] if other >= 0 else 0)
                    if 0 < relief < loads[busiest][0] - loads[rank][0]:
                        larger = max(loads[busiest][0] - relief, loads[rank][0] + relief)
                        found.append((larger, number, matrix, rank, other))
        if not found:
            return
        _, number, given, rank, other = min(found)
        moves = [(given, busiest, rank), (other, rank, busiest)]
        for matrix, source, target in moves[: 1 if other < 0 else 2]:
            loads[source] = (loads[source][0] - costs[matrix], loads[source][1] - sizes[matrix])
            loads[target] = (loads[target][0] + costs[matrix], loads[target][1] + sizes[matrix])
            owners[number][matrix] = target


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Elements of some matrices that each rank holds, owns, sends and receives. Gathers stay within a replica."""

    held: list[int]
    owned: list[int]
    gather_sent: list[int]
    gather_received: list[int]
    scatter_sent: tuple[list[int], list[int]]  # Within a replica, and between replicas; so is the next one.
    scatter_received: tuple[list[int], list[int]]


def count_elements(matrices: Sequence[Matrix], replica_of: Sequence[int]) -> Traffic:
    """Count elements on each rank for some matrices with owners, without a loop over pairs of ranks.

    ``replica_of`` is the replica of each rank of their exchange group.
    """
    held, owned, to_owners, from_holders = ([0] * len(replica_of) for _ in range(4))
    sent_between, received_between = ([0] * len(replica_of) for _ in range(2))
    # Matrices that lie alike have one object that says so.
    held_of = {id(matrix.held): matrix.held for matrix in matrices}
    num_alike, num_owned = Counter[int](), Counter[tuple[int, int]]()  # Of that object, and by the owner's replica.
    alike = Counter((id(matrix.held), matrix.numel, matrix.owner) for matrix in matrices)
    for (key, numel, owner), times in alike.items():
        by_replica, replica = held_of[key], replica_of[owner]
        own = times * by_replica[replica].get(owner, 0)
        num_alike[key] += times
        num_owned[key, replica] += times
        owned[owner] += times * numel
        from_holders[owner] += times * numel - own
        to_owners[owner] -= own  # Below all pieces are counted.
        sent_between[owner] += times * numel * (len(by_replica) - 1)
    for key, times in num_alike.items():
        for replica, holders in held_of[key].items():
            for rank, elements in holders.items():
                held[rank] += elements * times
                to_owners[rank] += elements * num_owned[key, replica]
                received_between[rank] += elements * (times - num_owned[key, replica])
    # Within a replica updates go back the way that pieces came.
    return Traffic(
        held=held,
        owned=owned,
        gather_sent=to_owners,
        gather_received=from_holders,
        scatter_sent=(from_holders, sent_between),
        scatter_received=(to_owners, received_between),
    )


def sharing_pays(
    flops: int, wire_bytes: int, *, device_type: str, num_matrices: int, num_replicas: int, replica_ranks: int
) -> bool:
    """Whether one owner for all R replicas is faster than one in each, if all N matrices are like this one.

    With S ranks in a replica, a rank computes ``m = max(1, N / S)`` matrices if replicas repeat the work. If they share
    it, it computes ``n = max(1, N / (R S))`` and sends each to R - 1 replicas. With speed F and bandwidth B sharing is
    faster if ``(m - n) flops / F > n (R - 1) wire_bytes / B``. ``wire_bytes`` are those of the whole matrix; unknown
    devices count as CUDA.
    """
    shared = max(1.0, num_matrices / (num_replicas * replica_ranks))
    repeated = max(1.0, num_matrices / replica_ranks)
    seconds_saved = (repeated - shared) * flops / _FLOPS_PER_BYTE.get(device_type, _FLOPS_PER_BYTE["cuda"])
    return seconds_saved > shared * (num_replicas - 1) * wire_bytes
