"""FlexDeMo of R nodes x S ranks in one process and float64, with loops and dictionaries, to compare FlexDeMo with.

Written from the papers (arXiv:2411.19870, Algorithm 1; arXiv:2502.06728, Algorithm 1), not from the package: its own
transform, blocks, choice, rounding, merge and shards.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from tests.reference.muon import Orthogonalization, plain
from tests.reference.muon_and_adamw import MuonAndOther

Gradients = Mapping[str, Tensor]
# What a node sends of one shard: (first row and column of a block, coefficient) -> value.
Sent = dict[tuple[int, ...], float]
# (number of elements, number of the exchange, number of the buffer) -> the positions that travel.
Choice = Callable[[int, int, int], Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Options of the run. ``choose`` takes the place of the transform and of ``top_k``, on flat buffers."""

    num_nodes: int
    ranks_per_node: int = 1
    base: Literal["sgd", "adamw", "muon"] = "sgd"
    sign: bool = False
    lr: float = 0.01
    muon_lr_factor: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)  # Of AdamW.
    eps: float = 1e-8
    decay: float = 0.999
    merge: Literal["contributors", "mean"] = "contributors"
    chunk_size: int = 64
    top_k: int = 32
    strips: bool = False  # Blocks of `chunk_size` elements of the flattened shard.
    dense_below: int = 4096
    value_format: Literal["fp32", "bf16"] = "fp32"
    choose: Choice | None = None
    orthogonalization: Orthogonalization = plain


class ReferenceFlexDeMo:
    """Weights, residuals and steps.

    With ``rules.choose`` the shards of the weights named by each of ``parts`` travel in one flat buffer, in its order.
    Of ``base="muon"`` Muon takes the ``matrices``. Weights that are ``replicated`` are whole on all ranks of a node.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        rules: Rules,
        *,
        parts: Sequence[Sequence[str]] = (),
        matrices: Sequence[str] = (),
        replicated: Sequence[str] = (),
    ) -> None:
        self.rules, self.parts, self.replicated = rules, parts, frozenset(replicated)
        self.weights = {name: weight.double().clone() for name, weight in weights.items()}
        self.num_steps = 0
        # Of each node, by name.
        self.residuals = [
            {name: torch.zeros_like(weight) for name, weight in self.weights.items()} for _ in range(rules.num_nodes)
        ]
        shared = {"lr": rules.lr, "weight_decay": rules.weight_decay}
        self._base = MuonAndOther(
            self.weights,
            matrices,
            partial(torch.optim.SGD, **shared)
            if rules.base == "sgd"
            else partial(torch.optim.AdamW, betas=rules.betas, eps=rules.eps, **shared),
            muon_lr_factor=rules.muon_lr_factor,
            momentum=0.0,
            nesterov=False,
            orthogonalization=rules.orthogonalization,
            dtype=torch.float64,
            **shared,
        )

    def shards(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Views of the rows of each rank of a node: pieces of ceil(rows / S) rows, the last ones short or empty."""
        if name in self.replicated:
            return [tensor]
        pieces = list(torch.chunk(tensor, self.rules.ranks_per_node))
        return pieces + [tensor[:0]] * (self.rules.ranks_per_node - len(pieces))

    def set_rate(self, lr: float) -> None:
        self._base.set_rate(lr)

    def step(self, gradients: Sequence[Gradients]) -> None:
        """One step with the gradients of each node; a gradient that only some nodes have is zero on the others."""
        merged = self._exchange(gradients)
        self._base.step({name: each.sign() if self.rules.sign else each for name, each in merged.items()})

    def _exchange(self, gradients: Sequence[Gradients]) -> dict[str, Tensor]:
        """Change the residuals, and give the merged updates back. One node has nobody to send anything to."""
        names = [name for name in self.weights if any(name in node for node in gradients)]
        if self.rules.num_nodes == 1:
            return {name: gradients[0][name].double() for name in names}
        for residuals, of_node in zip(self.residuals, gradients, strict=True):
            for name in names:
                gradient = of_node.get(name, torch.zeros_like(self.weights[name]))
                residuals[name].mul_(self.rules.decay).add_(gradient)
        merged = {name: torch.zeros_like(self.weights[name]) for name in names}
        for name, whole in merged.items():
            for index, shard in enumerate(self.shards(name, whole)):
                self._exchange_shard(name, index, shard)
        if self.rules.choose is not None:
            self._exchange_flat(merged)
        self.num_steps += 1
        return merged

    def _exchange_shard(self, name: str, index: int, merged: Tensor) -> None:
        """Fill in the merged update of one shard, which all nodes have sent their components of."""
        shards = [self.shards(name, residuals[name])[index] for residuals in self.residuals]
        if self.weights[name].ndim < 2 or self.weights[name].numel() < self.rules.dense_below:  # It travels whole.
            for shard in shards:
                sent = self._rounded(shard)
                shard.sub_(sent)
                merged += sent / len(shards)
        elif self.rules.choose is None:  # Otherwise _exchange_flat fills it in.
            cols = columns(self.weights[name].shape)
            matrices = [shard.view(1, -1) if self.rules.strips else shard.view(-1, cols) for shard in shards]
            messages = [self._encode(matrix) for matrix in matrices]
            for matrix, sent in zip(matrices, messages, strict=True):
                matrix.sub_(self._decode(sent, matrix))
            merged.copy_(self._decode(merge(messages, self.rules.merge), matrices[0]).view_as(merged))

    def _exchange_flat(self, merged: Mapping[str, Tensor]) -> None:
        """Fill in the updates of weights whose shards travel as flat buffers, of which only some positions are sent."""
        assert self.rules.choose is not None
        for part, members in enumerate(self.parts):
            for index in range(self.rules.ranks_per_node):
                of_nodes = [[self.shards(name, node[name])[index] for name in members] for node in self.residuals]
                buffers = [torch.cat([shard.flatten() for shard in shards]) for shards in of_nodes]
                total = torch.zeros_like(buffers[0])
                positions = list(self.rules.choose(total.numel(), self.num_steps, part))
                for buffer in buffers:
                    sent = torch.zeros_like(buffer)
                    sent[positions] = self._rounded(buffer[positions])
                    buffer -= sent
                    total += sent / len(buffers)
                sizes = [shard.numel() for shard in of_nodes[0]]
                for place, name in enumerate(members):
                    if name in merged:
                        targets = [*(shards[place] for shards in of_nodes), self.shards(name, merged[name])[index]]
                        for target, buffer in zip(targets, [*buffers, total], strict=True):
                            target.copy_(buffer.split(sizes)[place].view_as(target))

    def _encode(self, matrix: Tensor) -> Sent:
        """The largest coefficients of each block of a shard, rounded; a zero is nothing that is sent."""
        sent: Sent = {}
        for place, block in self._blocks_of(matrix):
            coefficients = (dct(block.shape[0]) @ block @ dct(block.shape[1]).T).flatten().tolist()
            largest = sorted(range(len(coefficients)), key=lambda i: -abs(coefficients[i]))[: self.rules.top_k]
            values = torch.tensor([coefficients[i] for i in largest], dtype=torch.float64)
            rounded = self._rounded(values).tolist()
            sent |= {(*place, i): value for i, value in zip(largest, rounded, strict=True) if value}
        return sent

    def _decode(self, sent: Sent, like: Tensor) -> Tensor:
        """The shard that the coefficients stand for."""
        decoded = torch.zeros_like(like)
        for (row, col), block in self._blocks_of(decoded):
            coefficients = torch.tensor(
                [sent.get((row, col, i), 0.0) for i in range(block.numel())], dtype=torch.float64
            )
            pixels = dct(block.shape[0]).T @ coefficients.view(block.shape) @ dct(block.shape[1])
            target = decoded[row : row + block.shape[0], col : col + block.shape[1]]
            target.copy_(pixels[: target.shape[0], : target.shape[1]])
        return decoded

    def _blocks_of(self, matrix: Tensor) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """Blocks of a shard, padded with zeros, with the first row and column of each."""
        side = self.rules.chunk_size
        height, width = min(side, matrix.shape[0]), side if self.rules.strips else min(side, matrix.shape[1])
        for row in range(0, matrix.shape[0], max(1, height)) if matrix.numel() else ():
            for col in range(0, matrix.shape[1], width):
                block = torch.zeros(height, width, dtype=torch.float64)
                piece = matrix[row : row + height, col : col + width]
                block[: piece.shape[0], : piece.shape[1]] = piece
                yield (row, col), block

    def _rounded(self, values: Tensor) -> Tensor:
        """What the wire carries."""
        dtype = torch.float32 if self.rules.value_format == "fp32" else torch.bfloat16
        return values.float().to(dtype).double()


def merge(messages: Sequence[Sent], rule: str) -> Sent:
    """Mean of what was sent for each coefficient: over the nodes that sent it, or over all nodes."""
    merged: Sent = {}
    for place in {place for sent in messages for place in sent}:
        values = [sent[place] for sent in messages if place in sent]
        merged[place] = sum(values) / (len(values) if rule == "contributors" else len(messages))
    return merged


def dct(size: int) -> Tensor:
    """Orthonormal DCT-II: row k is sqrt(2 / n) cos(pi (2 i + 1) k / (2 n)), row 0 is sqrt(1 / n)."""
    rows = [
        [math.sqrt((1 if k == 0 else 2) / size) * math.cos(math.pi * (2 * i + 1) * k / (2 * size)) for i in range(size)]
        for k in range(size)
    ]
    return torch.tensor(rows, dtype=torch.float64).view(size, size)


def columns(shape: Sequence[int]) -> int:
    """Columns of a weight, read as the matrix of leading and other dimensions that is nearest to a square."""
    sides = [(math.prod(shape[:dim]), math.prod(shape[dim:])) for dim in range(1, len(shape))]
    return min(sides, key=lambda side: max(side) / min(side))[1]
