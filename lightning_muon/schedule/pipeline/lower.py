"""Makes a program of an order: dependencies, messages, gathers, sums of gradients over data-parallel ranks.

Ranks of the program are those of the pipeline. Passes take a program and return one with more ops; they are called in
the order in which they are defined here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from lightning_muon.schedule.pipeline.nodes import (
    COMPUTE_KINDS,
    WEIGHT_KINDS,
    B,
    I,
    Node,
    Order,
    Pipeline,
    PipelineKind,
    stage_ranks,
)
from lightning_muon.schedule.pipeline.play import needs, play_order
from lightning_muon.schedule.program import TRANSFER, Op, Program


def build_program(order: Order, pipeline: Pipeline, *, tells_loss: bool = False) -> Program:
    """Make the program of an order, with a message wherever the next stage is on another rank.

    A message is one op on both of its ranks, of the same name, with ``group=(sender, receiver)``. Both list it at the
    time at which it is sent, so that all messages between two ranks are in the same order on both, and no rank waits
    for a message that depends on a later one of its own. A forward holds one unit of memory until its backward has
    ended. With ``tells_loss`` the last stage sends sum and number of the losses to all others after its last forward.
    """
    rank_of = stage_ranks(order)
    nodes = {node for listed in order for node in listed}
    program: Program = {rank: [] for rank in range(len(order))}
    num_losses = 0
    for is_end, node in play_order(order, pipeline, rank_of).log:
        for op in _messages(node, rank_of) if is_end else (_compute(node, nodes, rank_of),):
            program[op.rank].append(op)
        if tells_loss and is_end and node.stage == pipeline.num_stages - 1 and node.kind == PipelineKind.FORWARD:
            num_losses += 1
            for rank in range(len(order)) if num_losses == pipeline.num_microbatches else ():
                if rank != rank_of[node.stage]:
                    for op in _message(PipelineKind.LOSS, str(rank), (rank_of[node.stage], rank), behind=node):
                        program[op.rank].append(op)
    return program


def _compute(node: Node, nodes: AbstractSet[Node], rank_of: Mapping[int, int]) -> Op:
    """The op of a node, which needs others, or the messages with their results."""
    stage, kind, microbatch = node
    deps = tuple(
        _name(each.kind if rank_of[each.stage] == rank_of[stage] else _message_kind(each), each)
        for each in needs(node, nodes)
    )
    holds = kind == PipelineKind.FORWARD and not nodes.isdisjoint((B(stage, microbatch), I(stage, microbatch)))
    items = stage, microbatch
    return Op(kind=kind, key=node.key, rank=rank_of[stage], deps=deps, memory=int(holds), items=items)


def _messages(node: Node, rank_of: Mapping[int, int]) -> tuple[Op, ...]:
    """The ops of sender and receiver of a node's result; none if the result stays on its rank."""
    step = {PipelineKind.FORWARD: 1, PipelineKind.BACKWARD_WEIGHT: 0}.get(node.kind, -1)
    sender = rank_of[node.stage]
    group = (sender, rank_of.get(node.stage + step, sender))
    if group[0] == group[1]:
        return ()
    return _message(_message_kind(node), node.key, group, behind=node, items=(node.stage, node.microbatch))


def _message(
    kind: str, key: str, group: tuple[int, int], *, behind: Node, items: tuple[int, ...] = ()
) -> tuple[Op, Op]:
    """The ops of sender and receiver of a message; the sender sends it after the node ``behind``."""
    lane, deps = f"link {min(group)}-{max(group)}", (_name(behind.kind, behind),)
    send = Op(kind=kind, key=key, rank=group[0], lane=lane, deps=deps, items=items, group=group)
    return send, Op(kind=kind, key=key, rank=group[1], lane=lane, items=items, group=group)


def _name(kind: str, node: Node) -> str:
    return f"{kind}[{node.key}]"


def _message_kind(node: Node) -> str:
    return PipelineKind.ACTIVATION if node.kind == PipelineKind.FORWARD else PipelineKind.GRADIENT


def add_unshard(program: Program) -> Program:
    """Gather the weights of all stages of a rank at the start; the sum of a stage's gradients frees them.

    An FSDP2 module that frees them between a forward and the parts of its backward gives wrong gradients.
    """
    added: Program = {}
    for rank, ops in program.items():
        waiting = dict.fromkeys(op.items[0] for op in ops if op.kind in COMPUTE_KINDS)
        added[rank] = [_stage_op(PipelineKind.UNSHARD, stage, rank) for stage in waiting]
        for op in ops:
            if op.kind in COMPUTE_KINDS and op.items[0] in waiting:
                del waiting[op.items[0]]
                op = replace(op, deps=(*op.deps, f"{PipelineKind.UNSHARD}[{op.items[0]}]"))
            added[rank].append(op)
    return added


def add_reduce_grad(program: Program) -> Program:
    """Sum the gradients of a stage over the data-parallel ranks, once, after its last backward of all micro-batches.

    Other stages still run backward then, on this rank and on others. It waits for the loss, if that is sent.
    """
    added: Program = {}
    for rank, ops in program.items():
        losses = [op.name for op in ops if op.kind == PipelineKind.LOSS and op.group[1] == rank]
        last = _last_backwards(ops)
        added[rank] = []
        for index, op in enumerate(ops):
            added[rank].append(op)
            if index in last:
                added[rank].append(_stage_op(PipelineKind.REDUCE_GRAD, last[index][0], rank, last[index][1], *losses))
    return added


def add_tied(program: Program, tied: Sequence[Sequence[int]]) -> Program:
    """Sum the gradients of copies of a parameter, each in the given stages, after the sums over data-parallel ranks.

    The ranks with a copy wait for each other there, the last stage for the first one; earlier ops are not delayed.
    """
    rank_of = {op.items[0]: rank for rank, ops in program.items() for op in ops if op.kind == PipelineKind.REDUCE_GRAD}
    added = {rank: list(ops) for rank, ops in program.items()}
    for index, stages in enumerate(tied):
        ranks = tuple(sorted({rank_of[stage] for stage in stages}))
        for rank in ranks:
            deps = tuple(f"{PipelineKind.REDUCE_GRAD}[{stage}]" for stage in stages if rank_of[stage] == rank)
            group = ranks if len(ranks) > 1 else ()
            op = Op(kind=PipelineKind.TIED, key=str(index), rank=rank, deps=deps, items=(index,), group=group)
            added[rank].append(replace(op, lane=TRANSFER))
    return added


def _last_backwards(ops: Sequence[Op]) -> dict[int, tuple[int, str]]:
    """Index behind which an op delays no other rank -> the stage whose last backward ends there, and its name.

    The index is that of the last message that the backward sends, or else its own.
    """
    last = {op.items[0]: index for index, op in enumerate(ops) if op.kind in WEIGHT_KINDS}
    found: dict[int, tuple[int, str]] = {}
    for stage, index in last.items():
        name = ops[index].name
        sent = (place for place, op in enumerate(ops) if op.group and name in op.deps)
        found[max(sent, default=index)] = stage, name
    return found


def _stage_op(kind: str, stage: int, rank: int, *deps: str) -> Op:
    """A transfer of a whole stage."""
    return Op(kind=kind, key=str(stage), rank=rank, lane=TRANSFER, deps=deps, items=(stage,))
