"""Orders and programs as CSV, in the format that torch's pipeline runtime reads and writes.

A row per rank, a cell per action: ``2F0`` is the forward of micro-batch 0 in stage 2. With messages (``compute_comms``
in torch) there are also ``2SEND_F0`` and ``3RECV_F0`` for its output, ``3SEND_B0`` and ``2RECV_B0`` for the gradient of
that, ``2UNSHARD``, ``2RESHARD`` and ``2REDUCE_GRAD``. Empty cells, with which torch marks bubbles, mean nothing.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from lightning_muon.schedule.pipeline.lower import OpMaker, stage_op
from lightning_muon.schedule.pipeline.nodes import COMPUTE_KINDS, WEIGHT_KINDS, B, F, I, Node, Order, PipelineKind
from lightning_muon.schedule.program import TRANSFER, Op, Program

_MESSAGES = {PipelineKind.ACTIVATION: ("SEND_F", "RECV_F"), PipelineKind.GRADIENT: ("SEND_B", "RECV_B")}
_STAGE_KINDS = {
    "UNSHARD": PipelineKind.UNSHARD,
    "RESHARD": PipelineKind.RESHARD,
    "REDUCE_GRAD": PipelineKind.REDUCE_GRAD,
}
_CELL = re.compile(r"(\d+)(?:(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)|(UNSHARD|RESHARD|REDUCE_GRAD))")
# What torch writes for a forward and a backward that may run as one.
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


def order_to_csv(order: Order) -> str:
    """The format ``compute_only``."""
    return _to_text([str(node) for node in nodes] for nodes in order)


def order_from_csv(text: str) -> Order:
    """From the format ``compute_only``; pairs that may overlap become one after the other."""
    rows = _read(text)
    for rank, row in enumerate(rows):
        for action in row:
            if action.kind not in COMPUTE_KINDS:
                raise ValueError(
                    f"row {rank} has {action.stage}{action.kind}, but an order has {', '.join(COMPUTE_KINDS)} only; "
                    "read the text with program_from_csv"
                )
    return rows


def program_to_csv(program: Program) -> str:
    """The format ``compute_comms``, without what torch does not know: optimizer steps and the norm before them."""
    return _to_text([cell for op in ops if (cell := _cell(op))] for ops in program.values())


def program_from_csv(text: str) -> Program:
    """From the format ``compute_comms``. :func:`~.checks.validate_pipeline` checks the order of its messages."""
    rows = _read(text)
    maker = OpMaker([[action for action in row if action.kind in COMPUTE_KINDS] for row in rows])
    program: Program = {}
    for rank, row in enumerate(rows):
        program[rank] = []
        seen = Counter[tuple[int, str]]()
        last_weight: dict[int, str] = {}
        for action in row:
            stage, name, _ = action
            if name in COMPUTE_KINDS:
                op = maker.compute(action)
                if name in WEIGHT_KINDS:
                    last_weight[stage] = op.name
            elif name in _STAGE_KINDS:
                if name == "REDUCE_GRAD" and stage not in last_weight:
                    raise ValueError(f"row {rank} has {stage}REDUCE_GRAD before any backward of this stage")
                deps = (last_weight[stage],) if name == "REDUCE_GRAD" else ()
                op = stage_op(_STAGE_KINDS[name], stage, rank, *deps, lane=TRANSFER)
                # What is gathered and freed several times has a number.
                number = seen[stage, name]
                op = replace(op, key=f"{stage}.{number}" if number else op.key)
                seen[stage, name] += 1
            else:
                op = _message(action, maker, rank)
            program[rank].append(op)
    return program


def _message(action: Node, maker: OpMaker, rank: int) -> Op:
    is_sender, is_forward = action.kind.startswith("SEND"), action.kind.endswith("F")
    sender = action.stage if is_sender else action.stage + (-1 if is_forward else 1)
    nodes = [F(sender, action.microbatch)] if is_forward else [kind(sender, action.microbatch) for kind in (B, I)]
    found = [op for node in nodes if node in maker for op in maker.messages(node)]
    if not found:
        raise ValueError(f"row {rank} has {action}, but no rank has anything to send; give both ranks their F, B or I")
    op = found[0 if is_sender else 1]
    if op.rank != rank:
        raise ValueError(f"row {rank} has {action}, but the stage is on rank {op.rank}")
    return op


def _cell(op: Op) -> str:
    if op.kind in COMPUTE_KINDS:
        return str(Node(op.items[0], op.kind, op.items[1]))
    if op.kind in _MESSAGES:
        stage, microbatch = op.items
        is_receiver = op.rank == op.group[1]
        step = (1 if op.kind == PipelineKind.ACTIVATION else -1) * is_receiver
        return f"{stage + step}{_MESSAGES[op.kind][is_receiver]}{microbatch}"
    return "".join(f"{op.items[0]}{name}" for name, kind in _STAGE_KINDS.items() if kind == op.kind)


def _to_text(rows: Iterable[Iterable[str]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def _read(text: str) -> list[list[Node]]:
    """The actions of each rank, of which only some are nodes; those of a whole stage have micro-batch 0."""
    return [
        [action for cell in cells for action in _parse(cell.strip(), rank)]
        for rank, cells in enumerate(csv.reader(io.StringIO(text)))
    ]


def _parse(cell: str, rank: int) -> list[Node]:
    if not cell:
        return []
    if pair := _PAIR.fullmatch(cell):
        return [action for part in pair[1].split(";") for action in _parse(part.strip(), rank)]
    if not (match := _CELL.fullmatch(cell)):
        raise ValueError(f"row {rank} has {cell!r}; a cell is a stage, an action and a micro-batch, for example 2F0")
    stage, name, microbatch, stage_name = match.groups()
    return [Node(int(stage), name or stage_name, int(microbatch or 0))]
