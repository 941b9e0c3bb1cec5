"""Programs of a pipeline as CSV, in the format ``compute_comms`` of torch's runtime, to compare ours with it.

To the cells of an order (see nodes.py) come ``2SEND_F0`` and ``3RECV_F0`` for the output of a forward,
``3SEND_B0`` and ``2RECV_B0`` for the gradient of that, ``2UNSHARD``, ``2RESHARD`` and ``2REDUCE_GRAD``.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from dataclasses import replace

from lightning_muon.schedule.pipeline.lower import OpMaker, stage_op
from lightning_muon.schedule.pipeline.nodes import COMPUTE_KINDS, WEIGHT_KINDS, B, F, I, Node, PipelineKind
from lightning_muon.schedule.program import TRANSFER, Op, Program

_MESSAGES = {PipelineKind.ACTIVATION: ("SEND_F", "RECV_F"), PipelineKind.GRADIENT: ("SEND_B", "RECV_B")}
_STAGE_KINDS = {"UNSHARD": "unshard", "RESHARD": "reshard", "REDUCE_GRAD": "reduce_grad"}
_CELL = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)(\d*)")


def program_to_csv(program: Program) -> str:
    """Without what torch does not know: optimizer steps and the norm before them."""
    text = io.StringIO()
    csv.writer(text).writerows([cell for op in ops if (cell := _cell(op))] for ops in program.values())
    return text.getvalue()


def _cell(op: Op) -> str:
    if op.kind in COMPUTE_KINDS:
        return str(Node(op.items[0], op.kind, op.items[1]))
    if op.kind in _MESSAGES:
        stage, microbatch = op.items
        is_receiver = op.rank == op.group[1]
        step = (1 if op.kind == PipelineKind.ACTIVATION else -1) * is_receiver
        return f"{stage + step}{_MESSAGES[op.kind][is_receiver]}{microbatch}"
    return "".join(f"{op.items[0]}{name}" for name, kind in _STAGE_KINDS.items() if kind == op.kind)


def program_from_csv(text: str) -> Program:
    """The program of such a text, whose messages are in the order of the text."""
    cells = [[_CELL.fullmatch(cell.strip()) for cell in row if cell] for row in csv.reader(io.StringIO(text))]
    # Of a whole stage with micro-batch 0.
    rows = [[Node(int(match[1]), match[2], int(match[3] or 0)) for match in row if match] for row in cells]
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
                deps = (last_weight[stage],) if name == "REDUCE_GRAD" else ()
                op = stage_op(_STAGE_KINDS[name], stage, rank, *deps, lane=TRANSFER)
                # What is gathered and freed several times has a number.
                number = seen[stage, name]
                op = replace(op, key=f"{stage}.{number}" if number else op.key)
                seen[stage, name] += 1
            else:
                op = _message(action, maker)
            program[rank].append(op)
    return program


def _message(action: Node, maker: OpMaker) -> Op:
    is_sender, is_forward = action.kind.startswith("SEND"), action.kind.endswith("F")
    sender = action.stage if is_sender else action.stage + (-1 if is_forward else 1)
    nodes = [F(sender, action.microbatch)] if is_forward else [kind(sender, action.microbatch) for kind in (B, I)]
    found = [op for node in nodes if node in maker for op in maker.messages(node)]
    return found[0 if is_sender else 1]
