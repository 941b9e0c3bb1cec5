"""Silent corruption: bits that differ between replicas, and arithmetic that differs between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_muon.comm.agreement import checksums, gather
from lightning_muon.comm.collectives import start_all_to_all
from lightning_muon.comm.groups import AxisGroup, axis_group, host_group
from lightning_muon.config import join_names
from lightning_muon.flexdemo.optimizer import FlexDeMo
from lightning_muon.flexdemo.replicators import LocalSteps
from lightning_muon.math.newton_schulz import NewtonSchulz
from lightning_muon.optim.matrix_step import BatchSample, OrthogonalizedBatch
from lightning_muon.optim.planned_optimizer import PlannedOptimizer
from lightning_muon.params.layout import local_tensor, replicated_axes
from lightning_muon.sharding.base import ShardingMode
from lightning_muon.sharding.weights import mesh_device, names_of

_Ranks = tuple[DeviceMesh, tuple[int, ...]]  # The ranks that differ from this one only along these axes of the mesh.


class ReplicaCheck:
    """Compares, after every ``every``-th step, what several ranks must have alike, by checksums of the bits.

    Compared are weights and optimizer state, on the ranks that hold the same part of them, and results of
    Newton-Schulz. For these each rank draws one matrix that it has orthogonalized in this step, with its whole batch,
    because on a device the bits of a matrix may depend on its batch. The next rank gets the inputs, and must compute
    the same bits.
    """

    def __init__(self, module: nn.Module, mode: ShardingMode, *, every: int) -> None:
        self._module, self._mode, self._every = module, mode, every
        self._num_steps = Counter[torch.optim.Optimizer]()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Let a step that will be compared keep a sample of what it orthogonalizes; local."""
        if isinstance(optimizer, PlannedOptimizer) and (self._num_steps[optimizer] + 1) % self._every == 0:
            optimizer.sample = BatchSample()

    @torch.no_grad()
    def step_has_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step, and compare. Collective over all ranks; every rank must call it, and all raise."""
        self._num_steps[optimizer] += 1
        num_steps = self._num_steps[optimizer]
        if num_steps % self._every:
            return
        self._mode.finish_parameters()
        found = gather((self._differing_updates(optimizer), self._differing_copies(optimizer)), None)
        # Updates first: a wrong one makes weights differ, too.
        everywhere = [each for kind in zip(*found, strict=True) for each in sorted(set(chain.from_iterable(kind)))]
        if everywhere:
            raise RuntimeError(
                f"silent corruption: what several ranks must have alike differs after step {num_steps}: "
                f"{join_names(everywhere, separator='; ')}. Something has changed bits on some ranks only: broken "
                "memory, a broken device, or a program that changes weights on one rank. Load a checkpoint from "
                "before, and leave out the machine if it is named again"
            )

    def _differing_copies(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Names of what differs on ranks with the same parts. Collective as :meth:`step_has_ended` is."""
        copies: dict[tuple[_Ranks, torch.device], list[tuple[str, Tensor]]] = {}
        trains_alone = _trains_alone(optimizer)
        for name, parameter in names_of(self._module).items():
            if not trains_alone:
                place = self._ranks_of_weights(parameter), parameter.device
                copies.setdefault(place, []).append((name, parameter))
            state = {} if self._mode.options.decoupled_nodes else optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    place = self._ranks_of_state(parameter), value.device
                    copies.setdefault(place, []).append((f"{key} of {name}", value))
        found: list[str] = []
        for ((mesh, axes), _), named in copies.items():
            if axes:
                group = axis_group(mesh, axes)
                everyone = gather(checksums([local_tensor(tensor) for _, tensor in named]).tolist(), host_group(group))
                for (name, _), values in zip(named, zip(*everyone, strict=True), strict=True):
                    found += _odd_ones(name, values, group)
        return found

    def _differing_updates(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Names of matrices of the rank before this one whose updates have other bits there than here.

        Each rank sends the batch that it has kept to the next rank, which orthogonalizes it, too. Collective over all
        ranks, also those that have kept nothing; every rank must call it.
        """
        batch = None
        if isinstance(optimizer, PlannedOptimizer) and optimizer.sample is not None:
            batch, optimizer.sample = optimizer.sample.batch, None
        device = mesh_device(self._mode.mesh)
        everyone = gather(None if batch is None else _Task.of(batch), None)
        if (num_ranks := len(everyone)) == 1:
            return []
        rank = dist.get_rank()
        owner, second = (rank - 1) % num_ranks, (rank + 1) % num_ranks
        task, num_sent, num_received = everyone[owner], [0] * num_ranks, [0] * num_ranks
        matrices = torch.empty(0, device=device) if batch is None else batch.matrices.to(device)
        received = (
            torch.empty(0, device=device) if task is None else torch.empty(task.shape, dtype=task.dtype, device=device)
        )
        num_sent[second], num_received[owner] = matrices.nbytes, received.nbytes
        world = AxisGroup(dist.group.WORLD, rank, tuple((each,) for each in range(num_ranks)))
        out, into = (each.view(-1).view(torch.uint8) for each in (matrices, received))
        for work in start_all_to_all(out, num_sent, into, num_received, world):
            work.wait()
        if task is None or task.machine != _machine(task.device_type):
            return []
        updates = task.newton_schulz.orthogonalize(received.to(task.device_type), eps=task.eps)
        return [
            f"Newton-Schulz of {name} (between its owner, rank {owner}, and rank {rank})"
            for name, there, here in zip(task.names, task.sums, checksums(updates.unbind()).tolist(), strict=True)
            if there != here
        ]

    def _ranks_of_weights(self, parameter: Tensor) -> _Ranks:
        """The ranks with the same part of the weights; local."""
        mesh = self._mode.mesh
        if self._mode.options.decoupled_nodes and isinstance(parameter, DTensor):
            return mesh, (0,) if mesh.size(0) > 1 else ()
        if isinstance(parameter, DTensor):
            return parameter.device_mesh, replicated_axes(parameter.device_mesh, parameter.placements)
        return mesh, replicated_axes(mesh, [Replicate()] * mesh.ndim)

    def _ranks_of_state(self, parameter: Tensor) -> _Ranks:
        """The ranks with the same part of the optimizer's state; local."""
        mesh, placements = self._mode.layout.mesh_and_placements(parameter)
        return self._ranks_of_weights(parameter) if mesh is None else (mesh, replicated_axes(mesh, placements))


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What a rank must know to orthogonalize the matrices of another one, and to compare the results."""

    names: Sequence[str]
    newton_schulz: NewtonSchulz
    eps: float
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    machine: object
    sums: Sequence[int]  # Checksum of each result.

    @classmethod
    def of(cls, batch: OrthogonalizedBatch) -> _Task:
        """Describe a batch of this rank; local."""
        device_type = batch.matrices.device.type
        return cls(
            names=[job.matrix.name for job in batch.jobs],
            newton_schulz=batch.newton_schulz,
            eps=batch.eps,
            shape=tuple(batch.matrices.shape),
            dtype=batch.matrices.dtype,
            device_type=device_type,
            machine=_machine(device_type),
            sums=checksums(batch.updates.unbind()).tolist(),
        )


def _machine(device_type: str) -> object:
    """Describe the hardware: where it differs between ranks, products may have other bits."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    return torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()


def _trains_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each node has weights of its own."""
    return isinstance(optimizer, FlexDeMo) and isinstance(optimizer.config.replicator, LocalSteps)


def _odd_ones(name: str, values: Sequence[Hashable], group: AxisGroup) -> list[str]:
    """Say which ranks have another value than most, if any has; ``None`` does not count. Local."""
    counts = Counter(value for value in values if value is not None)
    if len(counts) < 2:
        return []
    assert group.group is not None
    ranks = dist.get_process_group_ranks(group.group)
    (usual, most), (_, next_most) = counts.most_common(2)
    known = [(rank, value) for rank, value in zip(ranks, values, strict=True) if value is not None]
    if most == next_most:
        return [f"{name} (between ranks {', '.join(str(rank) for rank, _ in known)})"]
    return [f"{name} (on rank {', '.join(str(rank) for rank, value in known if value != usual)})"]
