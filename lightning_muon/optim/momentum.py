"""Momenta that are kept in other ways than as tensors like their parameters: in 8 bits, in host memory, or both.

``optimizer.state[parameter]["momentum_buffer"]`` is a :class:`StoredMomentum` then. A saved state has a tensor like the
parameter under the same key, so that checkpoints go from any way of keeping momenta to any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_muon.comm.collectives import BufferPool
from lightning_muon.config import MuonConfig
from lightning_muon.math.quantization import dequantize, num_blocks, quantize
from lightning_muon.optim.parameters import RoutedParameter, StateCompletion, States
from lightning_muon.optim.step_plan import MatrixJob
from lightning_muon.params.layout import Layout, held_boxes, local_tensor
from lightning_muon.params.logical import Box, logical_matrices

KEY = "momentum_buffer"
# Tensors in a buffer begin at multiples of so many bytes.
_ALIGNMENT = 16


def offloads(config: MuonConfig, device: torch.device) -> bool:
    """Whether momenta of parameters on ``device`` are kept in the memory of the host."""
    return config.offload == "momentum" and device.type != "cpu"


@dataclass(frozen=True, eq=False)
class Piece:
    """The calling rank's piece of the momentum of one matrix, as it is kept."""

    shape: tuple[int, ...]  # Shape of the piece.
    tensors: tuple[Tensor, ...]  # The values in this shape, or codes and maxima of `math/quantization.py`.

    def values(self) -> Tensor:
        """The values: the kept ones (shares memory), or those that the codes stand for, in float32."""
        return self.tensors[0] if len(self.tensors) == 1 else dequantize(*self.tensors).reshape(self.shape)

    def keep(self, values: Tensor) -> None:
        """Keep these values."""
        codes = self.tensors[0]
        new = (values,) if len(self.tensors) == 1 else quantize(values.reshape(codes.shape))
        for kept, tensor in zip(self.tensors, new, strict=True):
            if kept is not tensor:
                kept.copy_(tensor)


class StoredMomentum:
    """The calling rank's part of the momentum of one parameter, matrix by matrix.

    The piece of each matrix is quantized by itself, since matrices of one parameter may be in different buckets.
    """

    def __init__(self, parameter: RoutedParameter, config: MuonConfig) -> None:
        local = parameter.layout.local(parameter.tensor).detach()
        is_quantized = config.momentum_dtype == "int8"
        self.dtype = torch.float32 if is_quantized else local.dtype  # Dtype of the values.
        self.shape, self.device = local.shape, local.device  # Those of the local part of the parameter.
        self.boxes = _boxes(parameter)  # The pieces in it.
        on_host = {"device": "cpu", "pin_memory": local.is_cuda}
        place: Any = on_host if offloads(config, local.device) else {"device": local.device}
        shapes = [box.shape for box in self.boxes]
        if is_quantized:
            num_leading = local.ndim - 1 if parameter.route.kind == "stack" else 1
            matrices = [(math.prod(shape[:num_leading]), math.prod(shape[num_leading:])) for shape in shapes]
            codes = _zeros(matrices, dtype=torch.int8, **place)
            maxima = _zeros([(rows, num_blocks(cols)) for rows, cols in matrices], dtype=torch.float32, **place)
            kept = list(zip(codes, maxima, strict=True))
        else:
            kept = [(values,) for values in _zeros(shapes, dtype=self.dtype, **place)]
        pieces = zip(self.boxes, kept, strict=True)
        self._pieces = {box.start: Piece(box.shape, tensors) for box, tensors in pieces}

    def tensors(self) -> list[Tensor]:
        """All tensors that are kept; waits for copies that are on their way to the host."""
        self._wait()
        return [tensor for piece in self._pieces.values() for tensor in piece.tensors]

    def piece(self, slices: tuple[slice, ...] | None) -> Piece:
        """The piece at these slices of the local part; ``None`` for all of it."""
        return self._pieces[(0,) * len(self.shape) if slices is None else tuple(each.start for each in slices)]

    def fill(self, local: Tensor) -> None:
        """Store these values, of any dtype and device, as the calling rank's part."""
        if local.shape != self.shape:
            raise ValueError(
                f"a momentum of the shape {tuple(local.shape)} was loaded where this rank's part of the parameter has "
                f"{tuple(self.shape)}; load the state as it was saved, or with set_optimizer_state_dict"
            )
        for box in self.boxes:
            values = local[tuple(map(slice, box.start, box.stop))]
            self._pieces[box.start].keep(values.to(self.device, self.dtype))

    def on_host(self) -> Tensor:
        """The values of the calling rank's part, in the memory of the host; waits for the device."""
        self._wait()
        local = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for box in self.boxes:
            local[tuple(map(slice, box.start, box.stop))] = self._pieces[box.start].values().cpu()
        return local

    def _wait(self) -> None:
        if self.device.type == "cuda":  # Its current stream waits for all that a step has copied.
            torch.cuda.current_stream(self.device).synchronize()


def _boxes(parameter: RoutedParameter) -> list[Box]:
    """The calling rank's pieces of the matrices of a parameter, as places in its local part; without empty ones."""
    tensor, shape = parameter.tensor, tuple(parameter.tensor.shape)
    mesh, placements = parameter.layout.mesh_and_placements(tensor)
    coordinate = () if mesh is None else tuple(mesh.get_coordinate() or ())
    (held,) = held_boxes(shape, () if mesh is None else tuple(mesh.shape), placements, [coordinate])
    pieces = [held.intersect(matrix.box) for matrix in logical_matrices(shape, parameter.route)]
    slices = [piece.slices_in(held) for piece in pieces if piece.numel]
    return [Box(tuple(each.start for each in own), tuple(each.stop for each in own)) for own in slices]


def _zeros(shapes: Sequence[Sequence[int]], **options: Any) -> list[Tensor]:
    """Zeros of these shapes, one behind the other in memory."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.split(torch.zeros(sum(sizes), **options), sizes) if sizes else ()
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


class MomentumCompletion(StateCompletion):
    """Makes and converts the state of a ParallelMuon that keeps momenta in 8 bits, in host memory, or both."""

    # torch would round the values before they become 8 bits, and move what belongs to the host to the device.
    kept_as_saved = frozenset({KEY})

    def __init__(self, config: MuonConfig) -> None:
        super().__init__()
        self._config = config

    @override
    def fill(self, parameter: RoutedParameter, state: dict[str, Any]) -> None:
        is_new = KEY not in state
        super().fill(parameter, state)
        if is_new and self._is_stored(parameter):
            state[KEY] = StoredMomentum(parameter, self._config)

    @override
    def convert(self, parameters: Sequence[RoutedParameter], states: States) -> None:
        for parameter in parameters:
            before: Any = states.get(parameter.tensor, {}).get(KEY)
            if before is None or not self._is_stored(parameter):
                continue
            # A tensor was loaded; other boxes come from a module that was attached later and knows fused weights.
            if isinstance(before, Tensor) or before.boxes != _boxes(parameter):
                values = local_tensor(before) if isinstance(before, Tensor) else before.on_host()
                stored = states[parameter.tensor][KEY] = StoredMomentum(parameter, self._config)
                stored.fill(values)

    @override
    def as_tensors(self, parameter: Tensor, state: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
        stored = state.get(KEY)
        if not isinstance(stored, StoredMomentum):
            return super().as_tensors(parameter, state, layout)
        # On the host: all of them on the device would take the memory that is to be saved there.
        return {**state, KEY: layout.laid_out(parameter, stored.on_host())}

    def _is_stored(self, parameter: RoutedParameter) -> bool:
        device = parameter.layout.local(parameter.tensor).device
        return parameter.route.algorithm != "adamw" and (
            self._config.momentum_dtype != "auto" or offloads(self._config, device)
        )


@dataclass(frozen=True, eq=False)
class _Staged:
    """Momenta of a bucket that are on the device while the step works on them."""

    jobs: Sequence[MatrixJob]
    stored: Sequence[Piece]  # On the host.
    pieces: Mapping[MatrixJob, Piece]  # On the device.


class Momenta:
    """Reads and writes the momenta for a step, wherever they are kept.

    Where the plan keeps them on the host, a bucket is fetched into one of ``num_buffers`` buffers of the device.
    """

    def __init__(self, device: torch.device, *, are_on_host: bool, num_buffers: int) -> None:
        self.are_on_host, self._num_buffers, self._device = are_on_host, num_buffers, device
        self._pool = BufferPool(torch.uint8, device)
        self._staged: dict[str, _Staged] = {}
        self._piece_of: dict[MatrixJob, Piece] = {}

    def begin_step(self, jobs_of: Mapping[str, Sequence[MatrixJob]], states: States) -> None:
        """Take buffers for these buckets, which are in the order of the step; local."""
        if not self.are_on_host:
            return
        stored = {key: [_stored(job, states) for job in jobs] for key, jobs in jobs_of.items()}
        largest = [0] * self._num_buffers
        for index, pieces in enumerate(stored.values()):
            slot, size = (
                index % self._num_buffers,
                sum(_aligned(tensor.nbytes) for piece in pieces for tensor in piece.tensors),
            )
            largest[slot] = max(largest[slot], size)
        # Take the memory now: on CUDA it belongs to the stream that is current.
        buffers = [self._pool.take(str(slot), size) for slot, size in enumerate(largest)]
        self._staged = {
            key: _Staged(jobs, stored[key], _views(jobs, stored[key], buffers[index % self._num_buffers]))
            for index, (key, jobs) in enumerate(jobs_of.items())
        }

    def fetch(self, key: str) -> None:
        """Copy the momenta of a bucket to the device."""
        if key in self._staged:
            staged = self._staged[key]
            for job, source in zip(staged.jobs, staged.stored, strict=True):
                for target, tensor in zip(staged.pieces[job].tensors, source.tensors, strict=True):
                    target.copy_(tensor, non_blocking=True)
            self._piece_of.update(staged.pieces)

    def store(self, key: str) -> None:
        """Copy the momenta of a bucket back."""
        if key in self._staged:
            staged = self._staged.pop(key)
            for job, target in zip(staged.jobs, staged.stored, strict=True):
                for tensor, source in zip(target.tensors, self._piece_of.pop(job).tensors, strict=True):
                    tensor.copy_(source, non_blocking=True)

    def end_step(self) -> None:
        """Forget what was fetched and not stored."""
        self._staged, self._piece_of = {}, {}

    def read(self, jobs: Sequence[MatrixJob], states: States) -> list[Tensor]:
        """The calling rank's pieces of the momenta; call :meth:`write` after changing them."""
        values: list[Tensor] = []
        for job in jobs:
            kept: Any = states[job.parameter.tensor][KEY]
            if isinstance(kept, StoredMomentum):
                values.append(self._on_device(job, kept).values())
            else:
                values.append(job.local_view(local_tensor(kept)))
        return values

    def write(self, jobs: Sequence[MatrixJob], values: Sequence[Tensor], states: States) -> None:
        """Keep what :meth:`read` has given and the step has changed in place."""
        for job, value in zip(jobs, values, strict=True):
            kept: Any = states[job.parameter.tensor][KEY]
            if isinstance(kept, StoredMomentum):
                self._on_device(job, kept).keep(value)

    def _on_device(self, job: MatrixJob, kept: StoredMomentum) -> Piece:
        """The piece on the device: the fetched one, or outside of a step a copy if it is kept on the host."""
        if job in self._piece_of:
            return self._piece_of[job]
        piece = kept.piece(job.pieces.slices)
        if not self.are_on_host:
            return piece
        return Piece(piece.shape, tuple(tensor.to(self._device, non_blocking=True) for tensor in piece.tensors))


def _stored(job: MatrixJob, states: States) -> Piece:
    kept: StoredMomentum = states[job.parameter.tensor][KEY]
    return kept.piece(job.pieces.slices)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _views(jobs: Sequence[MatrixJob], stored: Sequence[Piece], buffer: Tensor) -> dict[MatrixJob, Piece]:
    """For each job, views of ``buffer`` with the shapes and dtypes of its ``stored`` piece."""
    views: dict[MatrixJob, Piece] = {}
    start = 0
    for job, piece in zip(jobs, stored, strict=True):
        parts: list[Tensor] = []
        for tensor in piece.tensors:
            parts.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += _aligned(tensor.nbytes)
        views[job] = Piece(piece.shape, tuple(parts))
    return views
