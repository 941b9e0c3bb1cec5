"""Sizes of messages, in pure numbers."""

from __future__ import annotations

import math

from lightning_muon.replicators.local_steps import LocalSteps
from lightning_muon.replicators.positions import position_bytes
from lightning_muon.replicators.replicator import Replicator
from lightning_muon.replicators.values import value_format


def num_blocks(block_shape: tuple[int, ...], rows: int, cols: int) -> int:
    """Blocks of a ``rows x cols`` matrix: by both sides, by the flattened matrix, or for ``()`` one."""
    if len(block_shape) == 2:
        return math.ceil(rows / block_shape[0]) * math.ceil(cols / block_shape[1])
    return math.ceil(rows * cols / block_shape[0]) if block_shape else 1


def message_bytes(replicator: Replicator, values: str, rows: int, cols: int) -> int:
    """Bytes that a node sends of a ``rows x cols`` matrix which is held by one rank, with that value format."""
    if rows * cols == 0:
        return 0
    shape = replicator.block_shape(rows, cols)
    count, numel = num_blocks(shape, rows, cols), math.prod(shape) if shape else rows * cols
    num_sent = replicator.num_sent(numel)
    of_positions = count * num_sent * position_bytes(numel) if replicator.sends_positions else 0
    return value_format(values).num_bytes(count, num_sent) + of_positions


def bits_per_parameter(replicator: Replicator | LocalSteps, values: str, rows: int, cols: int) -> float:
    """Bits that a node sends for each parameter of a ``rows x cols`` matrix and step, counted from its message."""
    if isinstance(replicator, LocalSteps):
        return replicator.bits_per_parameter()
    return 8 * message_bytes(replicator, values, rows, cols) / (rows * cols)
