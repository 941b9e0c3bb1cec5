"""From the shapes of a model and the sizes of a mesh to what the planner takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from lightning_muon.math.newton_schulz import newton_schulz_flops
from lightning_muon.params.logical import logical_matrices
from lightning_muon.params.routing import Route
from lightning_muon.schedule.muon import MatrixSpec
from lightning_muon.schedule.shapes import ModelShapes, ParameterShape

# AdamW reads gradient, weight and two moments and writes the last three: 7 float32 numbers per element.
_ADAMW_BYTES = 7 * 4
Fused = Mapping[str, Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Replicas of so many shards each.

    Attributes:
        replicate: Number of replicas.
        shard: Ranks that share one replica.
    """

    replicate: int
    shard: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.replicate * self.shard


@dataclass(frozen=True, kw_only=True)
class ExchangeRanks:
    """The ranks among which matrices travel, and what each of them holds.

    Attributes:
        specs: One for each trainable matrix, in the order of the forward pass.
        replica_of: Replica of each rank.
        adamw_bytes: Memory traffic of AdamW on each rank.
    """

    specs: tuple[MatrixSpec, ...]
    replica_of: tuple[int, ...]
    adamw_bytes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.replica_of)


def route_of(parameter: ParameterShape) -> Route:
    """What the parameter is to the optimizer."""
    return Route(
        name=parameter.name,
        kind=parameter.kind,  # type: ignore[arg-type]
        reason=parameter.reason,
        splits=parameter.splits,
        split_dim=parameter.split_dim,
    )


def with_fused(model: ModelShapes, fused: Fused) -> ModelShapes:
    """Divide the weights whose names match a pattern into logical matrices.

    Args:
        model: Shapes.
        fused: Shell pattern -> sizes of the parts along dimension 0, or one number: so many equal parts.

    Raises:
        ValueError: If a pattern matches no matrix, or its parts do not make up the weight.
    """
    parameters = list(model.parameters)
    for pattern, parts in fused.items():
        matched = [
            i for i, p in enumerate(parameters) if p.kind == "matrix" and fnmatchcase(p.name, pattern) and not p.frozen
        ]
        if not matched:
            raise ValueError(f"fused pattern {pattern!r} matches no matrix of {model.name}")
        for i in matched:
            sizes = _part_sizes(parameters[i], parts)
            reason = f"{parameters[i].reason}, {len(sizes)} fused"
            parameters[i] = replace(parameters[i], splits=sizes, split_dim=0, reason=reason)
    return replace(model, parameters=tuple(parameters))


def with_stacks_cut_along(model: ModelShapes, dim: int) -> ModelShapes:
    """Shard stacks along another dimension than the one that counts matrices.

    Raises:
        ValueError: If there are no stacks, or they have no such dimension.
    """
    if not any(parameter.kind == "stack" for parameter in model.parameters):
        raise ValueError(f"{model.name} has no stacks of matrices that could be cut along dimension {dim}")
    return replace(
        model, parameters=tuple(replace(p, shard_dim=dim) if p.kind == "stack" else p for p in model.parameters)
    )


def exchange_ranks(model: ModelShapes, mesh: Mesh, *, ns_steps: int, is_grid: bool) -> ExchangeRanks:
    """What each rank holds, for weights that FSDP2 shards.

    Args:
        model: Shapes.
        mesh: Sizes.
        ns_steps: Newton-Schulz iterations.
        is_grid: Matrices may travel between replicas too; else each replica does the same for itself.
    """
    replicas = mesh.replicate if is_grid else 1
    cut = _Cut(mesh.shard, replicas)
    specs: list[MatrixSpec] = []
    for parameter in model.parameters:
        if parameter.frozen:
            continue
        for matrix in logical_matrices(parameter.shape, route_of(parameter)):
            dim = parameter.shard_dim
            spec = MatrixSpec(
                name=matrix.name,
                numel=matrix.rows * matrix.cols,
                flops=newton_schulz_flops(matrix.rows, matrix.cols, ns_steps),
                held=cut.held(
                    matrix.box.start[dim], matrix.box.stop[dim], parameter.shape[dim], matrix.rows * matrix.cols
                ),
                rows=matrix.rows,
                cols=matrix.cols,
            )
            specs.append(spec)
    replica_of = tuple(replica for replica in range(replicas) for _ in range(mesh.shard))
    return ExchangeRanks(specs=tuple(specs), replica_of=replica_of, adamw_bytes=_adamw_bytes(model, cut))


class _Cut:
    """Elements per rank of tensors that are cut into equal parts; equal questions get the same tuple."""

    def __init__(self, shard: int, replicas: int) -> None:
        self._shard = shard
        self._replicas = replicas
        self._known: dict[tuple[int, int, int, int], tuple[int, ...]] = {}

    def held(self, start: int, stop: int, size: int, numel: int) -> tuple[int, ...]:
        """Elements of ``start <= index < stop`` on each rank, where rank r has the r-th ``ceil(size / S)`` indices.

        The rule is that of ``torch.chunk``: the last ranks may have less or nothing.

        Args:
            start: First index, along the dimension that is cut.
            stop: End.
            size: Of the whole dimension.
            numel: Elements between ``start`` and ``stop``.
        """
        key = (start, stop, size, numel)
        if key not in self._known:
            part = -(-size // self._shard)
            counts = [0] * self._shard
            for rank in range(start // part, -(-stop // part)):
                inside = min(stop, (rank + 1) * part) - max(start, rank * part)
                counts[rank] = inside * numel // (stop - start)
            self._known[key] = tuple(counts) * self._replicas
        return self._known[key]


def _adamw_bytes(model: ModelShapes, cut: _Cut) -> tuple[int, ...]:
    """Memory traffic of AdamW on each rank."""
    columns = [
        cut.held(0, p.shape[p.shard_dim] if p.shape else 1, p.shape[p.shard_dim] if p.shape else 1, math.prod(p.shape))
        for p in model.parameters
        if p.kind == "elementwise" and not p.frozen and 0 not in p.shape
    ]
    if not columns:
        return cut.held(0, 1, 1, 0)
    return tuple(_ADAMW_BYTES * sum(counts) for counts in zip(*columns, strict=True))


def _part_sizes(parameter: ParameterShape, parts: Sequence[int]) -> tuple[int, ...]:
    size = parameter.shape[0]
    if len(parts) > 1:
        return tuple(parts)
    (number,) = parts
    if number < 1 or size % number:
        raise ValueError(f"{parameter.name} {parameter.shape} cannot be divided into {number} equal parts")
    return (size // number,) * number
