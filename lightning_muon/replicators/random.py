"""Elements drawn at random, the same on all nodes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_muon.replicators.checks import period, require_rate
from lightning_muon.replicators.replicator import Components, Replicator, Turn


@dataclass(frozen=True)
class Random(Replicator):
    """One of each ``round(1 / rate)`` neighbours, drawn at random; all nodes draw the same, so no positions travel.

    Values are summed up on the way. Bits per parameter and step, with ``v`` bits for a value: ``v / round(1 / rate)``.

    Attributes:
        rate: Part of the elements that is sent, in (0, 1].
        seed: Of the draws; equal on all nodes.
    """

    rate: float
    seed: int = 0

    sends_positions: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the rate."""
        require_rate(self)

    def num_sent(self, block_numel: int) -> int:
        """One for each cell, the last of which may be short."""
        return -(-block_numel // period(self.rate))

    def encode(self, blocks: Tensor, turn: Turn) -> Components:
        """The elements drawn, in their order."""
        flat = blocks.flatten(1)
        return Components(flat.index_select(1, self._positions(flat.size(1), turn, flat.device)), None)

    def decode(self, components: Components, block_shape: tuple[int, ...], turn: Turn) -> Tensor:
        """Zeros everywhere else."""
        values = components.values
        blocks = values.new_zeros((values.size(0), *block_shape))
        flat = blocks.flatten(1)
        flat.index_copy_(1, self._positions(flat.size(1), turn, flat.device), values)
        return blocks

    def _positions(self, block_numel: int, turn: Turn, device: torch.device) -> Tensor:
        """(num_sent,): one element of each cell."""
        cell = period(self.rate)
        key = hashlib.blake2b(f"{self.seed} {turn.step} {turn.part}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(key) >> 1)
        starts = torch.arange(0, block_numel, cell, device=device)
        drawn = torch.randint(cell, starts.shape, generator=generator, device=device)
        last_cell = block_numel - cell * (starts.numel() - 1)
        drawn[-1:] = torch.randint(last_cell, (1,), generator=generator, device=device)
        return starts.add_(drawn)
